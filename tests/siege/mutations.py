"""What may happen to the files of a run, by accident or by malice. Each mutation is one function of MUTATIONS."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import random
import shutil
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from accel_train.files import sha256

LARGE = 1 << 26  # bytes: larger files are sparse ones
HUGE = 1 << 40
TEXTS = [  # for names and strings: on a terminal and on a page they are escaped
    "cat\x1b[2J\x1b]0;siege\x07", "two\nlines", "\x9b31m", "\u202egnp.exe", "\u2066x\u2069", "a\rb", "\u2028", "\ud800",
    "<script>alert(1)</script>", "{{ 7 * 7 }}", "../../x", "/etc/passwd", "%s{0}", "x" * 100_000, "\0", "[bold]x",
    "None", "",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 0.5, 10**9, 10**400, -(10**30), math.nan, math.inf, 1e308, [], {}, [1], {"a": {"b": []}}, [[]],
    "7", *TEXTS,
]  # fmt: skip


class Victim:
    """A copy of a good run and some images, which a round mutates and gives to commands."""

    def __init__(self, folder: Path, run: Path, images: Path, chance: random.Random) -> None:
        self.folder, self.run, self.images, self.chance = folder, folder / "runs" / "run", folder / "images", chance
        shutil.copytree(run, self.run)
        shutil.copytree(images, self.images)
        self.outside = folder / "outside"  # of somebody else; links lead there
        (self.outside / "folder").mkdir(parents=True)
        for name in ("precious", "folder/precious"):
            (self.outside / name).write_text("precious")
        self.sentinel = folder / "code-was-executed"

    def file(self, *suffixes: str) -> Path:
        """Return one of the run's files, or rarely one of the images; one with such a suffix, if there is any."""
        place = self.images if not suffixes and self.chance.random() < 0.1 else self.run
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size < LARGE)
        fitting = [path for path in files if path.suffix in suffixes] or files
        return self.chance.choice(fitting or [self.run / "new"])

    def free(self) -> Path:
        """Return the path of a file, or now and then of a folder, that exists no longer."""
        path = self.file()
        if self.chance.random() < 0.1 and path.parent != self.run:
            path = path.parent
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return path

    def touch(self) -> str:
        """Return a shell command that shows that it was run."""
        return f"touch {self.sentinel}"


class Harm:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def read(path: Path) -> Any:
    """Return the content of a file of JSON, JSON lines or YAML; {} if it is not one any more."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
        text = path.read_text()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines()]
        return yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    return {}


def write(path: Path, values: Any) -> None:
    if path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(values, allow_unicode=False))
    elif path.suffix == ".jsonl" and isinstance(values, list):
        path.write_text("".join(json.dumps(line) + "\n" for line in values))
    else:
        path.write_text(json.dumps(values))


def change(value: Any, chance: random.Random, to: Callable[[Any], Any]) -> Any:
    """Return a copy in which one value, at any depth, is `to` of it."""
    if isinstance(value, dict) and value and chance.random() < 0.95:
        key = chance.choice(list(value))
        return {**value, key: change(value[key], chance, to)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        number = chance.randrange(len(value))
        return [*value[:number], change(value[number], chance, to), *value[number + 1 :]]
    return to(value)


def truncate(victim: Victim) -> None:
    path = victim.file()
    path.write_bytes(path.read_bytes()[: victim.chance.randrange(1 + path.stat().st_size)])


def flip_bytes(victim: Victim) -> None:
    path = victim.file()
    content = bytearray(path.read_bytes())
    for _ in range(victim.chance.randint(1, 5) if content else 0):
        content[victim.chance.randrange(min(len(content), 5000))] = victim.chance.randrange(256)
    path.write_bytes(content)


def append(victim: Victim) -> None:
    with victim.file().open("ab") as file:
        file.write(
            victim.chance.choice([b"\0" * 1000, b"\n{", b'{"kind": "train"}\n', b"\xff\xfe", b"\x1b[2J", b"[" * 10**5])
        )


def exchange(victim: Victim) -> None:
    shutil.copyfile(victim.file(), victim.folder / "aside")
    shutil.copyfile(victim.folder / "aside", victim.file())


def delete(victim: Victim) -> None:
    victim.free()


def another_kind(victim: Victim) -> None:
    """A folder, a pipe, a socket, or a link: to itself or above, to nothing or somebody else's file, to a device."""
    path = victim.free()
    kind = victim.chance.choice(["folder", "pipe", "socket", "link", "link", "link", "link"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):  # too long a path
            server.bind(str(path))
    else:
        inside = [path, path.parent, victim.run]
        outside = [victim.outside / name for name in ("nothing", "precious", "folder")]
        devices = [Path("/dev/zero"), Path("/dev/full"), Path("/dev/tty"), Path("/proc/self/mem")]
        path.symlink_to(victim.chance.choice(victim.chance.choice([inside, outside, devices])))


def moved_outside(victim: Victim) -> None:
    """The file or folder is elsewhere now, and a link leads there."""
    path = victim.file()
    path = path.parent if path.parent != victim.run and victim.chance.random() < 0.5 else path
    target = victim.outside / "moved"
    if not target.exists() and path.exists():
        path.rename(target)
        path.symlink_to(target)


def sparse(victim: Victim) -> None:
    """A huge file that needs no space, after what was there or alone."""
    path = victim.file() if victim.chance.random() < 0.5 else victim.free()
    with path.open("ab") as file:
        file.truncate(victim.chance.choice([HUGE, 1 << 33]))


def deep(victim: Victim) -> None:
    victim.file(".json", ".jsonl", ".yaml").write_text(victim.chance.choice(["[", '{"a":']) * 10**5)


def another_value(victim: Victim) -> None:
    path = victim.file(".json", ".jsonl", ".yaml")
    write(path, change(read(path), victim.chance, lambda _: victim.chance.choice(VALUES)))


def other_values(victim: Victim) -> None:
    for _ in range(5):
        another_value(victim)


def another_text(victim: Victim) -> None:
    path, text = victim.file(".json", ".jsonl", ".yaml"), victim.chance.choice(TEXTS)

    def everywhere(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: everywhere(inner) for key, inner in value.items()}
        return (
            [everywhere(inner) for inner in value]
            if isinstance(value, list)
            else text
            if isinstance(value, str)
            else value
        )

    write(
        path, everywhere(read(path)) if victim.chance.random() < 0.3 else change(read(path), victim.chance, everywhere)
    )


def another_key(victim: Victim) -> None:
    """A key is renamed, left out, or added."""
    path, name = victim.file(".json", ".jsonl", ".yaml"), victim.chance.choice(["seeds", "x", "__class__", *TEXTS])

    def renamed(values: Any) -> Any:
        if not isinstance(values, dict) or not values:
            return values
        gone = victim.chance.choice(list(values))
        kept = {key: value for key, value in values.items() if key != gone}
        return victim.chance.choice([kept, {**kept, name: values[gone]}, {**values, name: values[gone]}])

    values = read(path)
    inner = [key for key, value in values.items() if isinstance(value, dict)] if isinstance(values, dict) else []
    if inner and victim.chance.random() < 0.6:
        key = victim.chance.choice(inner)
        write(path, {**values, key: renamed(values[key])})
    else:
        write(path, change(values, victim.chance, renamed) if isinstance(values, list) else renamed(values))


def class_names(victim: Victim) -> None:
    """All files of the run call some classes by hostile names, as those of a hostile data set would."""
    model = read(victim.run / "model.json")
    names = model.get("classes") if isinstance(model, dict) else None
    if not isinstance(names, list) or not names:
        return
    new = {json.dumps(name): json.dumps(name + victim.chance.choice(TEXTS)) for name in map(str, names)}
    for path in (path for path in victim.run.rglob("*.json") if path.is_file()):
        text = path.read_text()
        for old, hostile in new.items():
            text = text.replace(old, hostile)
        path.write_text(text)


def file_names(victim: Victim) -> None:
    """A file gets a hostile name; a name that no file can have is left out."""
    path = victim.file()
    with contextlib.suppress(OSError, ValueError):
        copy = path.with_name(victim.chance.choice(TEXTS)[:80] + path.name)
        shutil.copyfile(path, copy)
        if victim.chance.random() < 0.5:
            path.unlink()


def name_of_the_run(victim: Victim) -> None:
    with contextlib.suppress(OSError, ValueError):
        victim.run = victim.run.rename(victim.run.with_name(f"run {victim.chance.choice(TEXTS)[:80]}"))


def numbers_of_checkpoints(victim: Victim) -> None:
    found = sorted(victim.run.glob("checkpoints/update-*"))
    if found:
        name = victim.chance.choice(["update-99999999", "update-x", "update--1", "update-00000000", "x", ".x"])
        with contextlib.suppress(OSError):
            victim.chance.choice(found).rename(victim.run / "checkpoints" / name)


def code_in_the_configuration(victim: Victim) -> None:
    """The run says that its model, data or loss is a function of Python's own, or of a file that it has itself."""
    values = read(victim.run / "config.yaml")
    if not isinstance(values, dict):
        return
    group, option = victim.chance.choice([("model", "kwargs"), ("data", "kwargs"), ("loss", "kwargs")])
    name = victim.chance.choice(["subprocess:getoutput", "os:system", "code/evil.py:net", "evil.py:net", "evil:net"])
    argument = {"subprocess:getoutput": "cmd", "os:system": "command"}.get(name)
    part = {"name": name} | ({option: {argument: victim.touch()}} if argument else {})
    write(victim.run / "config.yaml", {**values, group: part})
    (victim.run / "code").mkdir(exist_ok=True)
    shutil.copyfile(os.__file__ if name.startswith("os") else shutil.__file__, victim.run / "code" / "os.py")
    import subprocess

    shutil.copyfile(subprocess.__file__, victim.run / "code" / "subprocess.py")
    for place in (victim.run, victim.run / "code"):
        (place / "evil.py").write_text(f"import os\nos.system({victim.touch()!r})\nnet = None\n")


def code_of_the_run(victim: Victim) -> None:
    """The code that the run keeps runs a command now, and the run says that this is right."""
    import hashlib

    for path in (victim.run / "code").glob("*.py"):
        text = path.read_text() + f"\nimport os\nos.system({victim.touch()!r})\n"
        old = hashlib.sha256(path.read_bytes()).hexdigest()
        path.write_text(text)
        record = victim.run / "code.json"
        if record.is_file():
            record.write_text(record.read_text().replace(old, hashlib.sha256(text.encode()).hexdigest()))


def yaml_that_runs(victim: Victim) -> None:
    tag = victim.chance.choice(["!!python/object/apply:os.system", "!!python/object/new:os.system"])
    with (victim.run / "config.yaml").open("a") as file:
        file.write(f"\nabout: {tag} [{victim.touch()!r}]\n")


def pickle_that_runs(victim: Victim) -> None:
    """A pickle in the place of a file of tensors or arrays."""
    path, harm = victim.file(".pt", ".npz", ".npy", ".safetensors"), pickle.dumps(Harm(victim.touch()))
    if path.suffix == ".npz":
        array = io.BytesIO()
        np.save(array, np.array([Harm(victim.touch())], dtype=object), allow_pickle=True)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(
                victim.chance.choice(["labels.npy", "logits.npy", "classes.npy", "x.npy"]), array.getvalue()
            )
    elif path.suffix == ".pt":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", harm)
            archive.writestr("archive/version", "3")
    else:
        path.write_bytes(harm)


def another_state(victim: Victim) -> None:
    """One value of the optimizer's state, or of the tensors in it, is another one."""
    path = victim.file(".pt")
    tensors = torch.zeros(3), torch.tensor(math.nan), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1).expand(10**9)
    with contextlib.suppress(Exception):  # it was damaged before
        state = torch.load(path, weights_only=True)
        torch.save(change(state, victim.chance, lambda _: victim.chance.choice([*VALUES, *tensors])), path)


def base_of_the_configuration(victim: Victim) -> None:
    values = read(victim.run / "config.yaml")
    bases = [
        "/dev/zero",
        "config.yaml",
        "../run/config.yaml",
        "/dev/stdin",
        "nothing.yaml",
        str(victim.outside),
        "../../x",
    ]
    write(
        victim.run / "config.yaml",
        {**(values if isinstance(values, dict) else {}), "base": victim.chance.choice(bases)},
    )


def files_named_by_the_configuration(victim: Victim) -> None:
    """A file in a setting of the model: a pipe, an endless one, a pickle."""
    values = read(victim.run / "config.yaml")
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        return
    target = victim.folder / "named"
    if not target.exists():
        os.mkfifo(target) if victim.chance.random() < 0.5 else target.write_bytes(pickle.dumps(Harm(victim.touch())))
    found = victim.chance.choice([str(target), "/dev/zero"])
    key = victim.chance.choice(["checkpoint_path", "pretrained_cfg_overlay", "weights", "file", "model_dir"])
    part = victim.chance.choice(
        [{"kwargs": {key: found}}, {"weights": found}, {"name": "resnet18", "kwargs": {key: found}}]
    )
    write(victim.run / "config.yaml", {**values, "model": {**values["model"], **part}})  # type: ignore[dict-item]


def header_of_weights(victim: Victim) -> None:
    """The header of a safetensors file is longer than the file, or says something else."""
    path = victim.file(".safetensors")
    content = path.read_bytes()
    size = victim.chance.choice([0, 1, len(content), 2**40, 2**63])
    changes: list[tuple[bytes, bytes]] = [
        (b"F32", b"I64"),
        (b"F32", b"BF16"),
        (b"data_offsets", b"data_offsetz"),
        (b"weight", b"\xff"),
    ]
    old, new = victim.chance.choice(changes)
    path.write_bytes(victim.chance.choice([size.to_bytes(8, "little") + content[8:], content.replace(old, new, 1)]))


def weights_that_are_not_finite(victim: Victim) -> None:
    from safetensors.numpy import load, save

    path = victim.file(".safetensors")
    with contextlib.suppress(Exception):  # it was damaged before
        weights = load(path.read_bytes())
        name = victim.chance.choice(sorted(weights))
        harm: list[Callable[[Any], Any]] = [
            lambda value: value * np.nan, lambda value: value.astype(np.float64), lambda value: value[..., :1],
            lambda value: value.astype(np.int32), lambda value: value * np.float32(1e38),
        ]  # fmt: skip
        weights[name] = np.ascontiguousarray(victim.chance.choice(harm)(weights[name]))
        path.write_bytes(save(weights))


MUTATIONS: list[Callable[[Victim], None]] = [
    truncate, flip_bytes, append, exchange, delete, *[another_kind] * 7, moved_outside, sparse, deep, another_value,
    another_value, other_values, another_text, another_text, another_key, another_key, class_names, file_names,
    name_of_the_run, numbers_of_checkpoints, code_in_the_configuration, code_of_the_run, yaml_that_runs,
    pickle_that_runs, another_state, base_of_the_configuration, files_named_by_the_configuration, header_of_weights,
    weights_that_are_not_finite,
]  # fmt: skip


def rehash(run: Path) -> None:
    """Let the manifests of the checkpoints say that their files are right, as somebody would who means harm."""
    for manifest in run.glob("checkpoints/*/manifest.json"):
        with contextlib.suppress(OSError):
            files = {
                path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
                for path in manifest.parent.iterdir()
                if path.is_file() and path.name != "manifest.json" and path.stat().st_size < LARGE
            }
            manifest.write_text(json.dumps({"files": files}))
