"""What is read is a regular file of a bounded size: nothing waits for a pipe, and nothing fills the memory."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from accel_train import cli
from accel_train.checkpoint.reading import RunWeights
from accel_train.config.recipe import read_recipe
from accel_train.config.schema import Data
from accel_train.data.sources.folder import FileImages
from accel_train.data.sources.index import SplitFiles, StringArray
from accel_train.errors import UserError
from accel_train.files import (
    NotRegularFileError,
    parse_json,
    read_json_lines,
    read_json_object,
    read_regular_file,
    read_yaml,
)
from accel_train.models.weights import read_state
from accel_train.ownership.owner import read_owner
from accel_train.records.trackers import point_of
from accel_train.run.start import find_file

HUGE = 1 << 40


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """What waits for ever is a failure, not a test that hangs."""

    def end(*_: Any) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def sparse(path: Path, size: int = HUGE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def device(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert read_regular_file(tmp_path / "a", 100_000) == b"x" * 100_000
    (tmp_path / "b").symlink_to("a")
    assert len(read_regular_file(tmp_path / "b", follow=True)) == 100_000
    assert read_regular_file(Path("/proc/self/status"), follow=True).startswith(b"Name:")  # its size is said to be 0
    with pytest.raises(NotRegularFileError, match="a link"):
        read_regular_file(tmp_path / "b")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(NotRegularFileError, match="a socket"):
            read_regular_file(tmp_path / "s")
    for path, kind in ((pipe(tmp_path / "p"), "pipe"), (tmp_path, "folder"), (device(tmp_path / "d"), "device")):
        with pytest.raises(NotRegularFileError, match=f"a {kind}, not a regular file"):
            read_regular_file(path, follow=True)
    for most in (99_999, 0):
        with pytest.raises(ValueError, match="100,000 bytes, more than such a file can have"):
            read_regular_file(tmp_path / "a", most)
    with pytest.raises(FileNotFoundError):
        read_regular_file(tmp_path / "nothing")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(OSError):
            read_regular_file(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("make", [pipe, sparse, device])
def test_records_of_a_run_that_are_no_files_of_its_size(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    assert read_json_object(make(tmp_path / "result.json")) == {}
    with pytest.raises(OSError):
        list(read_json_lines(make(tmp_path / "metrics.jsonl")))
    make(tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml: "):
        read_recipe(str(tmp_path / "config.yaml"))
    make(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        RunWeights.read(tmp_path / "model.safetensors")
    if make is not sparse:
        with pytest.raises(OSError):
            read_owner(make(tmp_path / "owner.json"))


def test_a_long_line_of_the_log_is_damaged_and_the_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "a"}\n' + bytes(1 << 25) + b'\n{"kind": "b"}\n{"kind": "c')
    assert [line["kind"] for line in read_json_lines(file)] == ["a", "b"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("make", [pipe, device])
def test_weights_that_are_no_files(tmp_path: Path, make: Callable[[Path], Path], suffix: str) -> None:
    with pytest.raises(UserError, match=f"--model.weights: .*w{suffix}: expected a file of weights"):
        find_file(make(tmp_path / f"w{suffix}"))


@pytest.mark.parametrize("make", [pipe, sparse, device])
def test_an_image_that_is_no_file(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    make(tmp_path / "b.png")
    files = SplitFiles(StringArray(["a.png", "b.png"]), torch.zeros(2, dtype=torch.int64))
    images = FileImages(tmp_path, files, Data())
    assert images.fetch([0])[0].shape == (3, 8, 8)
    with pytest.raises(UserError, match=r"b\.png cannot be read: .*(not a regular file|bytes, more than)"):
        images.fetch([1])


def test_predict_and_check_data_name_a_pipe_among_the_images(
    digits_run: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path("data", name).mkdir(parents=True)
        for number in range(8):
            Image.new("L", (8, 8), number).save(f"data/{name}/{number}.png")
    pipe(Path("data/a/pipe.png"))
    device(Path("data/a/zero.png"))
    assert cli.main(["predict", str(digits_run), "data/a"]) == 1
    assert capfd.readouterr().err.count("not a regular file.") == 2
    assert cli.main(["check-data", "folder", "--data.root", "data"]) == 1
    assert Path("unreadable-data.txt").read_text().splitlines()[1:] == ["a/pipe.png", "a/zero.png"]


BRACKETS = "[" * 40_000
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 60))


@pytest.mark.parametrize("text", [BRACKETS, MERGES, f"epochs: {BRACKETS}"])
@pytest.mark.parametrize("nodes", [False, True])
def test_yaml_has_a_bounded_depth_and_no_aliases(tmp_path: Path, text: str, nodes: bool) -> None:
    with pytest.raises(yaml.YAMLError, match=r"more than 100 parts inside each other|an alias"):
        read_yaml(text, nodes=nodes)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml:\d+: not YAML: (more than 100 parts|an alias)"):
        read_recipe(str(tmp_path / "config.yaml"))
    assert read_yaml("a: [1, 2]\nc: {<<: {d: 1}}") == {"a": [1, 2], "c": {"d": 1}}


def test_numbers_that_nothing_can_hold_are_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time in (("good", "1.0"), ("bad", "1" + "0" * 400), ("word", '"x"')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("epochs: 3\n")
        (tmp_path / name / "status.json").write_text(
            f'{{"state": "failed", "epoch": 2, "epochs": {time}, "time": {time}}}'
        )
        (tmp_path / name / "result.json").write_text(f'{{"test_accuracy": {time}}}' if name != "good" else "{}")
    assert cli.main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.count("2/1") == 1 and shown.count("2/?") == 1 and all(name in shown for name in ("good", "bad", "word"))
    )
    for text in ("1" + "0" * 400, "[" * 100_000, '{"a": -1' + "0" * 5000 + "}"):
        with pytest.raises(ValueError):
            parse_json(text)
    assert parse_json('{"a": [1, -2, 0.5]}') == {"a": [1, -2, 0.5]}
    point = point_of({"kind": "train", "update": 3, "epoch": "x", "time": "x", "loss": 1.0})
    assert point is not None and (point.step, point.epoch, point.time) == (3, 0, 0.0)


def test_weights_without_values_or_of_any_size_are_refused(tmp_path: Path) -> None:
    for name, tensor in (
        ("meta", torch.empty(3, device="meta")),
        ("sparse", torch.eye(3).to_sparse()),
        ("rows", torch.eye(3).to_sparse_csr()),
    ):
        torch.save({"weight": tensor}, tmp_path / f"{name}.pth")
        with pytest.raises(UserError, match=r"weight is a tensor without its values, or a sparse one|run code"):
            read_state(tmp_path / f"{name}.pth")
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 36], "data_offsets": [0, 1 << 38]}}).encode()
    huge = tmp_path / "model.safetensors"
    huge.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(huge, 8 + len(header) + (1 << 38))
    with pytest.raises(UserError, match="cannot be read"):
        RunWeights.read(huge)


PACKAGE = Path(cli.__file__).parent.parent
READERS = {
    "read_text", "read_bytes", "write_text", "write_bytes", "touch", "load_file", "safe_open", "ZipFile", "GzipFile",
    "memmap", "open_memmap", "fromfile", "loadtxt", "genfromtxt", "ParquetFile", "read_table", "safe_load", "load_all",
    "compose", "full_load",
}  # fmt: skip
"""Names of functions that open a file by its path, or read YAML or JSON."""
LIBRARIES = {"np", "numpy", "yaml", "torch", "json", "pickle", "export", "jit"}
"""Whose function `load` does."""
EXCEPTIONS = {
    "files": "is the door",
    # What the system says
    "tools.doctor.job": "/proc", "tools.doctor.node": "/proc and cgroups",
    "launch.process": "/proc",
    "errors": "/dev/null",
    # Files of the package, and of a folder that the program has just made
    "data.sources.arrays": "the digits of the package",
    "tools.doctor.storage": "its own scratch folder", "tools.export": "a new folder",
    "checkpoint.own_optimizer": "bytes in memory, which it has just written",
    "cli.evaluate": "temporary files beside what the user names", "cli.recipes": "what the user names",
    "tools.shards": "a folder that it has just made",
    # Checked before
    "checkpoint.directory": "verify_files has found regular files", "checkpoint.reading": "require_regular_file",
    "data.sources.tars": "tarfile of an opened file",
    "user_code": "the import of a user's own code",
    "data.sources.user": "the same",
    # Not yet
}  # fmt: skip
"""Modules that open files by themselves -> why they may."""


def opens_a_file(call: ast.Call) -> bool:
    """Whether a call opens a file by its path; not a reader of bytes in memory, nor a method `open` of our own."""
    function, first = call.func, call.args[0] if call.args else None
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if first is not None and ast.unparse(first).startswith("io.BytesIO"):
        return False
    if name == "open":
        is_mode = isinstance(first, ast.Constant) and isinstance(first.value, str)
        return not owner or owner in ("os", "io", "Image", "tarfile", "gzip") or first is None or is_mode
    return name in READERS or (name == "load" and owner.split(".")[-1] in LIBRARIES)


def test_files_are_opened_by_one_door() -> None:
    opening = {}
    for path in PACKAGE.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if found := [f"{call.lineno}: {ast.unparse(call)}" for call in calls if opens_a_file(call)]:
            opening[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = found
    unknown = {module: calls for module, calls in opening.items() if module not in EXCEPTIONS}
    assert not unknown, f"{unknown}: read and write with files.py"
    assert not EXCEPTIONS.keys() - opening.keys()
