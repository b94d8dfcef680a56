"""Files with correct hashes and wrong contents: one line of error, exit code 2, and no file is changed."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import tarfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from accel_train.checkpoint.directory import BrokenError, checkpoint_path, list_updates, verify_checkpoint
from accel_train.checkpoint.state import TrainState
from accel_train.cli import main
from accel_train.config.schema import Data
from accel_train.data.sources.webdataset import webdataset
from accel_train.errors import UserError
from accel_train.files import sha256

HOSTILE = (  # type: ignore[var-annotated]
    None, True, "", "7", "../../x", "a\nb\x1b[2J", [], {}, [1], {"a": {"b": []}}, -1, 0.5, 10**9, 10**400, -(10**30),
    math.nan, math.inf, 1e308,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Give the test an empty working directory, a new Accelerate state, and a time limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    signal.alarm(300)
    yield
    signal.alarm(0)
    helpers.forget_accelerate()


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    """Return a copy of a real, unfinished run with three checkpoints."""
    run = tmp_path / "run"
    shutil.copytree(digits_run, run)
    (run / "result.json").unlink()
    return run


def newest(run: Path) -> Path:
    return checkpoint_path(run / "checkpoints", list_updates(run / "checkpoints")[-1])


def listed(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.lstat().st_ino, path.lstat().st_size) for path in folder.rglob("*")}


def edit_manifest(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(checkpoint / "manifest.json", lambda manifest: change(manifest["files"]))


def rehash(checkpoint: Path) -> None:
    """Write a manifest with the hashes of the present files."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in checkpoint.iterdir()
        if path.name != "manifest.json"
    }
    (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_state(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(checkpoint / "state.json", change)
    rehash(checkpoint)


def edit_optimizer(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    change(tree)
    torch.save(tree, checkpoint / "optimizer.pt")
    rehash(checkpoint)


def edit_weights(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    if (file.parent / "manifest.json").exists():
        rehash(file.parent)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """`make` replaces the file; the manifest keeps the old file's hash."""
    path.unlink()
    make(path)


def first_state(tree: dict[str, Any]) -> dict[str, Any]:
    return next(iter(tree["state"].values()))


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "words": (lambda c: edit_state(c, lambda s: s["train"].update(update="x")), "update is 'x', which no run"),
    "nan": (lambda c: edit_state(c, lambda s: s["train"].update(best_value=math.nan)), "best_value is 'nan'"),
    "no position": (lambda c: edit_state(c, lambda s: s["train"].pop("epoch")), "epoch is 'missing'"),
    "another update": (lambda c: edit_state(c, lambda s: s["train"].update(update=5)), "rename it to update-00000005"),
    "another epoch": (lambda c: edit_state(c, lambda s: s["train"].update(epoch=0)), "update 54 is not in epoch 1"),
    "no versions": (lambda c: edit_state(c, lambda s: s.update(versions=[])), "not a file of this program"),
    "a meaning": (lambda c: edit_state(c, lambda s: s.update(samples="x")), "data: x -> "),
    "no settings": (lambda c: edit_state(c, lambda s: s.update(configuration=[])), "not a file of this program"),
    "two lines": (
        lambda c: edit_state(c, lambda s: s["configuration"].update(seed="1\naccel-train: all is well\x1b[2J")),
        r"seed: 1\naccel-train: all is well\x1b[2J -> 0",
    ),
    "deep": (lambda c: ((c / "state.json").write_text("[" * 10**5), rehash(c)), "not a file of this program"),
    "another shape": (
        lambda c: edit_optimizer(c, lambda o: first_state(o).update(momentum_buffer=torch.zeros(3))),
        "is a tensor (3,) instead of a tensor (",
    ),
    "a number": (lambda c: edit_optimizer(c, lambda o: first_state(o).update(momentum_buffer=1.0)), "is 1.0 instead"),
    "no numbers": (
        lambda c: edit_optimizer(
            c, lambda o: first_state(o).update(momentum_buffer=first_state(o)["momentum_buffer"].to_sparse())
        ),
        "has a tensor that is not an ordinary one",
    ),
    "a list": (lambda c: (torch.save([1], c / "optimizer.pt"), rehash(c)), "does not fit this run's optimizer"),
    "no archive": (lambda c: ((c / "optimizer.pt").write_bytes(b"x" * 99), rehash(c)), "not a file of this program"),
    "whole numbers": (
        lambda c: edit_weights(c / "model.safetensors", lambda w: w.update({k: v.int() for k, v in w.items()})),
        "is int32 there and float32 in this model",
    ),
    "another mean": (
        lambda c: edit_weights(c / "ema.safetensors", lambda w: w.popitem()), "is missing there and (",
    ),
    "a pipe": (lambda c: replaced(c / "state.json", os.mkfifo), "is a pipe, not a regular file"),
    "a manifest that is a pipe": (lambda c: replaced(c / "manifest.json", os.mkfifo), "is a pipe, not a regular"),
    "an endless file": (lambda c: replaced(c / "model.safetensors", lambda p: p.symlink_to("/dev/zero")), "is a link"),
    "a link": (
        lambda c: replaced(c / "optimizer.pt", lambda p: p.symlink_to(c.parent / "update-00000023/optimizer.pt")),
        "is a link, not a regular file",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_no_run_wrote_is_refused(run: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = CHECKPOINTS[case]
    damage(newest(run))
    before = listed(run)
    assert main(["train", f"{run}/config.yaml", "--output-dir", str(run)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("accel-train: error: ") and err.count("\n") == 1, err
    assert message in err
    assert out == ""
    assert listed(run) == before


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "names nothing": lambda files: files.clear(),
    "names one less": lambda files: files.pop("optimizer.pt"),
    "names no EMA": lambda files: files.pop("ema.safetensors"),
    **{
        f"names {name}": lambda files, name=name: files.update({name: {"size": 0, "sha256": ""}})  # type: ignore[misc]
        for name in ("/dev/zero", "../../secret", "..", "", "a/b", ".hidden", "a\0b")
    },
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_of_other_files_is_an_altered_one(run: Path, case: str) -> None:
    edit_manifest(newest(run), MANIFESTS[case])
    with pytest.raises(BrokenError, match=r"manifest\.json is altered"):
        verify_checkpoint(newest(run))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([field.name for field in fields(TrainState)]), json_values))
def test_a_position_is_one_that_a_run_can_have_or_refused(changes: dict[str, Any]) -> None:
    good = TrainState(
        epoch=2, update=60, epoch_samples=25, epoch_left_out=5, samples_seen=3000, best_value=0.9, best_update=58,
        epoch_loss_sum=1.5, epoch_correct=10, epoch_count=20, train_seconds=3.5, timed_samples=2900,
        skipped_updates=1,
    )  # fmt: skip
    assert TrainState.from_saved(asdict(good), Path("x")) == good
    try:
        found = TrainState.from_saved({**asdict(good), **changes}, Path("x"))
    except UserError as error:
        assert "x/state.json: " in str(error)
        return
    assert 0 <= found.epoch <= found.update < 2**63
    for value in (found.epoch_loss_sum, found.train_seconds, found.best_value or 0):
        assert math.isfinite(value)
    assert found.skipped_updates >= 0 and found.skipped_in_a_row >= 0
    assert TrainState.from_saved(json.loads(json.dumps(asdict(found))), Path("x")) == found


@pytest.mark.parametrize("command", ["predict", "evaluate"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: edit(run / "model.json", lambda m: m.update(classes="abc")), "classes is not a list"),
        (lambda run: edit(run / "model.json", lambda m: m.update(std=[0.0])), "std is (0.0,)"),
        (lambda run: edit(run / "model.json", lambda m: m.update(channels=True)), "channels is True"),
        (lambda run: edit(run / "model.json", lambda m: m.update(image_size=10**9)), "image_size is 1000000000"),
        (lambda run: edit(run / "model.json", lambda m: m.update(native_size="8")), "native_size is 8"),
        (lambda run: replaced(run / "model.json", os.mkfifo), "cannot be read (a pipe, not a regular file)"),
        (lambda run: (run / "config.yaml").write_text("about: {recipe: ../../etc}"), "name is '../../etc'"),
        (lambda run: (run / "config.yaml").write_text("base: /dev/zero"), "/dev/zero: cannot be read: a device"),
        (lambda run: replaced(run / "config.yaml", os.mkfifo), "has no config.yaml"),
        (
            lambda run: edit_weights(run / "model.safetensors", lambda w: w.update({k: w[k].long() for k in w})),
            "is int64 there",
        ),
        (
            lambda run: ((run / "model.safetensors").unlink(), replaced(newest(run) / "ema.safetensors", os.mkfifo)),
            "is a pipe",
        ),
    ],
)  # fmt: skip
def test_a_run_of_somebody_else_is_looked_at_first(
    run: Path, command: str, damage: Callable[[Path], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "ema.safetensors").unlink()
    damage(run)
    words = [command, str(run), *([__file__] if command == "predict" else [])]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1]
    assert len(err.splitlines()) == 1
    assert not list(run.glob("evaluation*"))


@pytest.mark.parametrize("name", ["../../x", "/etc", "..", ".", ".x", "a/b", "", " ", "a\\nb", "x" * 300])
def test_the_name_of_a_recipe_is_no_path(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(f'base: digits\nabout: {{recipe: "{name}"}}\nepochs: 1\n')
    assert main(["train", "mine.yaml"]) == 2
    assert "mine.yaml: the recipe's name is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def packed(members: dict[str, bytes], sizes: dict[str, int] | None = None) -> bytes:
    """Return a tar file; `sizes`: wrong sizes for its headers."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    found = bytearray(file.getvalue())
    for name, size in (sizes or {}).items():
        at = found.index(name.encode())
        found[at + 124 : at + 136] = size.to_bytes(12, "big", signed=True)
        found[at + 148 : at + 156] = b" " * 8
        found[at + 148 : at + 156] = b"%06o\0 " % sum(found[at : at + 512])
    return bytes(found)


def long_name() -> bytes:
    """Return the header that announces a long name, and the name."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 512
    return info.tobuf(tarfile.GNU_FORMAT) + b"x".ljust(512, b"\0")


LONG_NAME = long_name()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed({"cat/1.jpg": b"x"}, {"cat/1.jpg": -(2**88)}), "cannot be read"),
        (packed({"cat/1.jpg": b"x"}, {"cat/1.jpg": -1024}), "has no size"),
        (LONG_NAME * 3000 + packed({"cat/1.jpg": b"x"}), "cannot be read"),
    ],
)  # fmt: skip
def test_a_tar_file_that_nobody_packed(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.tar").write_bytes(content)
    with pytest.raises(UserError, match=message):
        webdataset(Data("wds", root=tmp_path))
    (tmp_path / "train.tar").unlink()
    os.mkfifo(tmp_path / "train.tar")
    with pytest.raises(UserError, match="a pipe, not a regular file"):
        webdataset(Data("wds", root=tmp_path))


@pytest.mark.parametrize("label", ["²", "9" * 30, "1000000", "-1", "x" * 10**6])
def test_a_shard_with_impossible_classes(tmp_path: Path, label: str) -> None:
    (tmp_path / "x-train.tar").write_bytes(packed({"a.jpg": b"x", "a.cls": label.encode()}))
    with pytest.raises(UserError, match="is not a class number"):
        webdataset(Data("wds", root=tmp_path))


@pytest.mark.parametrize("name", ["../x.tar", "/x.tar", "a/../../x.tar", 7])
def test_shards_elsewhere_are_not_followed(tmp_path: Path, name: object) -> None:
    (tmp_path / "x.tar").write_bytes(packed({"a.jpg": b"x", "a.cls": b"1"}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "_info.json").write_text(json.dumps({"splits": {"train": {"filenames": [name]}}}))
    with pytest.raises(UserError, match="is not in this folder"):
        webdataset(Data("wds", root=tmp_path / "data"))
