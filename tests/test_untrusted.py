"""What is read is a regular file of a bounded size: nothing waits for a pipe, and nothing fills the memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accel_train import cli
from accel_train.analysis.predictions import read_predictions
from accel_train.cli.of_run.runs import _epoch as epoch_of
from accel_train.config.recipe import read_recipe
from accel_train.config.schema import Data
from accel_train.data.sources.files.folder import FileImages
from accel_train.data.sources.files.index_file import SplitFiles
from accel_train.data.sources.shared import StringArray
from accel_train.errors import UserError
from accel_train.ownership.owner import read_owner
from accel_train.run.start import find_file
from accel_train.untrusted import NotRegularFileError, read_json_lines, read_json_object, read_regular_file

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
    assert epoch_of(tmp_path, {}) == "?/?"
    if make is not sparse:
        with pytest.raises(OSError):
            read_owner(make(tmp_path / "owner.json"))


def test_a_long_line_of_the_log_is_damaged_and_the_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "a"}\n' + bytes(1 << 25) + b'\n{"kind": "b"}\n{"kind": "c')
    assert [line["kind"] for line in read_json_lines(file)] == ["a", "b"]


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("make", [pipe, sparse, device])
def test_weights_that_are_no_files_of_weights(tmp_path: Path, make: Callable[[Path], Path], suffix: str) -> None:
    with pytest.raises(UserError, match=f"--model.weights: .*w{suffix} cannot be read"):
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
    assert cli.main(["check-data", "folder", "--root", "data"]) == 1
    assert Path("unreadable-data.txt").read_text().splitlines()[1:] == ["a/pipe.png", "a/zero.png"]


@pytest.mark.slow
def test_damaged_records_of_an_evaluation_are_one_line(digits_run: Path, tmp_path: Path, capsys: Any) -> None:
    run = Path(shutil.copytree(digits_run, tmp_path / "run"))
    assert cli.main(["report", str(run)]) == 0
    kept = run / "predictions-test.npz"
    content = kept.read_bytes()
    for damaged in (content[:-100], content[: len(content) // 2], b"PK", b""):
        kept.write_bytes(damaged)
        with pytest.raises(UserError, match="is not a predictions file"):
            read_predictions(kept)
        assert cli.main(["report", str(run), "--no-evaluate", "true"]) == 0
        assert "is not a predictions file" in (run / "report.html").read_text()
    arrays = dict(np.load(whole_file(content, tmp_path)))
    for name, wrong in (
        ("labels", arrays["labels"] + 10),
        ("logits", arrays["logits"][:5]),
        ("ids", arrays["ids"][:5]),
    ):
        np.savez(kept, **(arrays | {name: wrong}))
        with pytest.raises(UserError, match="is not a predictions file"):
            read_predictions(kept)
    kept.write_bytes(content)
    record = run / "evaluation-test.json"
    whole = json.loads(record.read_text())
    for key, wrong in (("accuracy", {"a": [1]}), ("confusion", [[{}]]), ("calibration", "no"), ("class_recall", {})):
        record.write_text(json.dumps(whole | {name: whole[name] | {key: wrong} for name in ("model", "ema")}))
        capsys.readouterr()
        assert cli.main(["report", str(run)]) == 2, key
        found = capsys.readouterr().err
        assert found.count("\n") == 1 and "evaluation-SPLIT.json" in found and str(run) in found
    record.write_text(json.dumps(whole | {"model": 3, "ema": [whole["ema"]]}))
    assert cli.main(["report", str(run)]) == 2


def whole_file(content: bytes, folder: Path) -> Path:
    file = folder / "whole.npz"
    file.write_bytes(content)
    return file
