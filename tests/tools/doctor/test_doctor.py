"""`accel-train doctor` and the checks in a training's start, on processes that have what users' nodes had."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN
from accel_train.tools.doctor.doctor import CHECKS

WORKER = helpers.ROOT / "tests" / "doctor_worker.py"
FOLDER = ["digits", "--data.name", "folder", "--data.channels", "3", "--data.workers", "0", "--model.image-size", "8"]
FOLDER += ["--batch-size", "4", "--epochs", "1"]


def findings(printed: str) -> dict[str, dict[str, str]]:
    """The rows of the table that the doctor has printed, by check, with the advice below it."""
    lines = printed.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("status "))
    starts = [match.start() for match in re.finditer(r"\w+", lines[head])]
    rows = [line for line in lines[head + 1 :] if line[starts[1] - 2 :].startswith("  ")]
    found: dict[str, dict[str, str]] = {}
    for row in rows[: len(CHECKS)]:
        cells = [row[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        found[cells[1]] = dict(zip(("status", "measured", "expected"), (cells[0], *cells[2:]), strict=True))
    for name, each in found.items():
        if each["status"] in (WARN, FAIL):
            (line,) = [line for line in lines if line.startswith(f"{each['status']} {name}: ")]
            each["advice"] = line.partition(": ")[2]
            assert each["advice"]
    return found


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Folder 0 with images for rank 0, and folder 1 for rank 1, in which an image is another one of the same size."""
    place = tmp_path / "images"
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (place / "0" / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / "0" / split / label / f"{number}.bmp")
    shutil.copytree(place / "0", place / "1")
    Image.new("RGB", (16, 16)).save(place / "1" / "train" / "dog" / "2.bmp")
    return place


@pytest.mark.ci
def test_digits_on_two_processes_has_nothing_to_fear(tmp_path: Path) -> None:
    words = ["doctor", "--output-dir", tmp_path / "run", "--batch-size", "64"]
    done = helpers.python("-m", "accel_train", *words, processes=2, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(done.stdout)
    assert list(found) == list(CHECKS) and len(CHECKS) == 18
    of = {name: each["status"] for name, each in found.items()}
    assert {of[name] for name in ("versions", "variables", "data-contents", "update", "save")} == {PASS}
    missing = ("gpu-health", "reading", "slowest-pair", "time-left", "signal")
    assert {of[name] for name in missing} == {NA}
    assert "1,438 training" in found["data-contents"]["measured"]
    assert "2 processes x 1 accumulation x 32 images" in found["update"]["measured"]
    assert "an epoch" in found["update"]["measured"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.ci
def test_what_is_wrong_on_one_process_is_found_and_said_of_it(images: Path, tmp_path: Path) -> None:
    words = ["doctor", *FOLDER, "--output-dir", tmp_path / "run"]
    done = helpers.python(WORKER, images, *words, processes=2, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(done.stdout)
    of = {name: each["status"] for name, each in found.items()}
    assert of["versions"] == of["variables"] == of["data-contents"] == FAIL
    assert of["clocks"] == of["matmul"] == WARN
    assert of["all-reduce"] == PASS
    assert found["versions"]["measured"].startswith("driver is NVRM version: 535.183.01 on rank 1 (")
    assert "timm is 0.1 on rank 1 (" in found["versions"]["measured"]
    assert "NCCL_IB_DISABLE is 1 on rank 1" in found["variables"]["measured"]  # and not NCCL_DEBUG
    assert re.search(r"pixels of image \d+ \(2\.bmp\) is \w+ on rank 1", found["data-contents"]["measured"])
    assert "rank 1" in found["matmul"]["measured"]
    assert re.search(r"rank 1 .* is -(300|299\.9)", found["clocks"]["measured"]), found["clocks"]
    assert f"FAIL variables: {found['variables']['advice']}" in done.stdout


@pytest.mark.ci
def test_a_training_is_checked_before_its_first_checkpoint(images: Path, tmp_path: Path) -> None:
    """It prints what is wrong and one line, and trains; strict ends it; a start that goes on is not checked again."""
    words = ["train", *FOLDER, "--output-dir", tmp_path / "run"]
    strict = helpers.python(WORKER, images, *words, processes=2, timeout=280, DOCTOR="strict")
    assert strict.returncode == 2 and "Traceback" not in strict.stderr, strict.stdout + strict.stderr
    assert "DOCTOR=strict, and these checks failed: versions, variables (see above)" in strict.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

    printed = helpers.python(WORKER, images, *words, processes=2, timeout=280, DOCTOR="print")
    assert printed.returncode == 0, printed.stdout + printed.stderr
    lines = [line for line in printed.stdout.splitlines() if re.match("PASS|WARN|FAIL|n/a|accel-train doctor", line)]
    assert len(lines) == len(set(lines)) and not [line for line in lines if line.startswith(("PASS", "n/a"))]
    assert {"FAIL versions", "FAIL variables", "WARN clocks", "FAIL data-contents"} <= {
        line.partition(":")[0] for line in lines
    }
    (summary,) = [line for line in lines if line.startswith("accel-train doctor: ")]
    assert lines[-1] == summary and summary.startswith("accel-train doctor: 3 FAIL, ")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["updates"] == 2

    words[-1] = tmp_path / "unchecked"
    unchecked = helpers.python(WORKER, images, *words, processes=2, timeout=280)
    assert unchecked.returncode == 0 and "accel-train doctor" not in unchecked.stdout
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("run", "unchecked")]
    assert weights[0] == weights[1]

    words[-1] = tmp_path / "run"
    helpers.unfinish(tmp_path / "run")
    again = helpers.python(
        WORKER, images, *words, "--epochs", "2", "--allow-change", "epochs", processes=2, timeout=280, DOCTOR="strict"
    )
    assert again.returncode == 0 and "accel-train doctor" not in again.stdout, again.stdout + again.stderr


def test_a_mistyped_mode_counts_as_print_and_is_said(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    from accel_train.cli.train import preflight_of_start

    for mode, is_checked in (("stict", True), ("", True), ("off", False), ("print", True)):
        monkeypatch.setenv("DOCTOR", mode)
        assert (preflight_of_start(0) is not None) == is_checked
    said = capsys.readouterr().out  # type: ignore[attr-defined]
    assert said.splitlines()[0] == (
        "warning: DOCTOR is 'stict'; expected print, strict, off. Did you mean 'strict'? It counts as print."
    )
    monkeypatch.delenv("DOCTOR")
    assert preflight_of_start(0) is None


@pytest.mark.ci
def test_an_image_that_cannot_be_read(images: Path, tmp_path: Path) -> None:
    for file in (images / "0" / "train").rglob("*.bmp"):
        file.write_bytes(file.read_bytes()[:100])
    words = [*FOLDER, "--data.root", images / "0", "--output-dir", tmp_path / "run"]
    done = helpers.python("-m", "accel_train", "doctor", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(done.stdout)
    assert found["reading"]["status"] == FAIL and ".bmp" in found["reading"]["measured"]
    assert "check-data" in found["reading"]["measured"]


@pytest.mark.ci
def test_a_node_without_the_data(images: Path, tmp_path: Path) -> None:
    words = ["doctor", *FOLDER, "--output-dir", tmp_path / "run"]
    done = helpers.python(WORKER, images, *words, processes=2, timeout=280, FAULT="data")
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(done.stdout)
    assert found["data-contents"]["status"] == FAIL
    assert found["data-contents"]["measured"].startswith("On rank 1, but not on all: "), found["data-contents"]
    assert found["update"]["status"] == NA


@pytest.mark.ci
def test_a_read_only_output_directory_and_a_small_shared_memory(tmp_path: Path) -> None:
    """In mounts that this process alone sees."""
    (tmp_path / "disk").mkdir()
    mounts = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o ro tmpfs {tmp_path}/disk && exec "
    command = f'{mounts}"$0" -m accel_train doctor digits "$@"'
    words = ["--output-dir", tmp_path / "disk" / "run"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, *map(str, words)],
        capture_output=True, text=True, cwd=tmp_path, env=helpers.environment(), timeout=280,
    )  # fmt: skip
    if "unshare: " in done.stderr or "mount: " in done.stderr:
        pytest.skip(f"only root can mount: {done.stderr.strip()}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stdout + done.stderr
    found = findings(done.stdout)
    for name in ("room", "save"):
        assert found[name]["status"] == FAIL and "Read-only file system" in found[name]["measured"], found[name]
        assert "--output-dir" in found[name]["advice"]
    assert found["shared-memory"]["status"] == WARN and found["shared-memory"]["measured"] == "64 MiB free"


def test_a_recipe_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "digts"]) == 2
    assert "Did you mean 'digits'" in capsys.readouterr().err


def test_one_process_without_memory_is_named_and_the_others_do_not_wait(tmp_path: Path) -> None:
    words = ["doctor", "digits", "--batch-size", "64"]
    done = helpers.python(WORKER, tmp_path, *words, processes=2, timeout=280, FAULT="memory")
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(done.stdout)
    assert found["update"]["status"] == FAIL and "rank 1 (" in found["update"]["measured"]
    assert "give --micro-batch-size 16" in found["update"]["advice"]
    assert found["input"]["status"] == NA
