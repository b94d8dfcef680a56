"""`accel-train doctor`: what it finds on processes that have what users' nodes had, and how it judges."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import helpers
import numpy as np
import pytest
from PIL import Image

from accel_train.cli import main
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN
from accel_train.doctor.doctor import CHECKS

WORKER = helpers.ROOT / "tests" / "doctor_worker.py"


def findings(file: Path) -> dict[str, dict[str, str]]:
    found = {each["name"]: each for each in json.loads(file.read_text())["checks"]}
    assert all(set(each) == {"name", "status", "measured", "expected", "advice"} for each in found.values())
    assert all(each["advice"] for each in found.values() if each["status"] in (WARN, FAIL))
    return found


DISTURBED = ("room", "matmul", "import")
"""The checks of speeds that another test may disturb."""
LONG = ("matmul-bf16", "all-reduce")


@pytest.mark.ci
@pytest.mark.parametrize("left_out", [(*DISTURBED, *LONG), pytest.param(DISTURBED, marks=pytest.mark.slow)])
def test_digits_on_two_processes_has_nothing_to_fear(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    words = ["doctor", "--json", tmp_path / "found.json", "--output-dir", tmp_path / "run", "--batch-size", "64"]
    words += ["--seconds", "250", "--skip", *left_out]  # beside other tests its usual minute is not enough
    done = helpers.python("-m", "accel_train", *words, processes=2, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")
    assert list(found) == [check.name for check in CHECKS if check.name not in left_out]
    of = {name: each["status"] for name, each in found.items()}
    passed = "processes versions variables shared-folder data data-contents update evaluation all-reduce save forecast"
    assert {of[name] for name in passed.split() if name not in left_out} == {PASS}
    missing = "gpus gpu-health gpu-memory gpu-copy images reading interface slowest-pair transport time-left requeue"
    assert {of[name] for name in [*missing.split(), "signal-lead", "signal-path"]} == {NOT_CHECKED}
    assert (
        "1,438 training" in found["data"]["measured"]
        and "2 processes x 1 accumulation x 32 images, shared evenly by 1, 2, 4, 8, 16" in found["update"]["measured"]
    )
    assert "rank 1: " in done.stdout and not (tmp_path / "run").exists()  # nothing is left behind
    assert list(tmp_path.iterdir()) == [tmp_path / "found.json"]


@pytest.mark.ci
def test_what_is_wrong_on_one_process_is_found_and_said_of_it(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "0" / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "0" / split / label / f"{number}.png")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    Image.new("RGB", (16, 16)).save(tmp_path / "1" / "train" / "dog" / "2.png")
    words = ["digits", "--quick", "--data.name", "folder", "--batch-size", "4", "--model.image-size", "8"]
    words += ["--data.channels", "3", "--json", tmp_path / "found.json", "--seconds", "250"]  # type: ignore[list-item]
    done = helpers.python(WORKER, tmp_path, *words, processes=2, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")
    of = {name: each["status"] for name, each in found.items()}
    assert of["versions"] == of["variables"] == of["shared-folder"] == of["data-contents"] == FAIL
    assert of["clocks"] == of["matmul"] == WARN
    assert of["data"] == of["images"] == of["all-reduce"] == PASS
    assert found["versions"]["measured"].startswith("driver is NVRM version: 535.183.01 on rank 1 (")
    assert "NCCL_DEBUG is INFO on rank 1" in found["variables"]["measured"]
    assert "the sizes and images of rank 1" in found["data-contents"]["measured"]
    assert found["data-contents"]["measured"].endswith("dog/2.png")
    assert "rank 1" in found["matmul"]["measured"]
    assert re.search(r"rank 1 .* is -(90|89\.9)", found["clocks"]["measured"]), found["clocks"]
    assert f"FAIL variables: {found['variables']['advice']}" in done.stdout


@pytest.mark.ci
def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(tmp_path / "data" / split / label / "1.png")
    (tmp_path / "data" / "train" / "dog" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    words = ["--data.name", "folder", "--data.root", tmp_path / "data", "--batch-size", "2", "--data.channels", "3"]
    words += ["--quick", "--json", tmp_path / "found.json", "--output-dir", tmp_path / "run"]
    done = helpers.python("-m", "accel_train", "doctor", "digits", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")
    assert found["images"]["status"] == FAIL and "dog/1.png" in found["images"]["measured"]
    assert "check-data" in found["images"]["advice"]


@pytest.mark.ci
def test_a_port_on_which_nobody_listens(tmp_path: Path) -> None:
    words = ["doctor", "--quick", "--batch-size", "64", "--rendezvous-timeout-seconds", "2"]
    world = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    port = helpers.free_port()
    done = helpers.python("-m", "accel_train", *words, cwd=tmp_path, MASTER_PORT=port, **world)  # type: ignore[arg-type]
    assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_names_and_options_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "digits", "--skip", "verions"]) == 2
    assert capsys.readouterr().err.endswith("no check is named 'verions'. Did you mean 'versions'?\n")
    assert main(["doctor", "digits", "--seconds", "0"]) == 2
    assert main(["doctor", "digts"]) == 2
    assert "Did you mean 'digits'" in capsys.readouterr().err


def test_without_time_a_check_is_not_done(tmp_path: Path) -> None:
    done = helpers.python("-m", "accel_train", "doctor", "--seconds", "0.001", "--json", tmp_path / "found.json")
    assert done.returncode == 0
    assert {each["status"] for each in findings(tmp_path / "found.json").values()} == {NOT_CHECKED}


def test_one_process_without_memory_is_named_and_the_others_do_not_wait(tmp_path: Path) -> None:
    words = ["digits", "--batch-size", "64", "--json", tmp_path / "found.json", "--seconds", "250"]
    words += ["--skip", "matmul", "matmul-bf16", "all-reduce", "import"]
    done = helpers.python(WORKER, tmp_path, *words, processes=2, timeout=280, FAULT="memory")
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")
    assert found["update"]["status"] == FAIL and "rank 1 (" in found["update"]["measured"]
    assert "give --micro-batch-size 16" in found["update"]["advice"]
    assert found["evaluation"]["status"] == found["forecast"]["status"] == NOT_CHECKED


@pytest.mark.slow
def test_a_training_that_is_killed_and_continued_has_the_same_weights(tmp_path: Path) -> None:
    others = [check.name for check in CHECKS]
    words = ["doctor", "--drill", "--skip", *others, "--json", tmp_path / "found.json"]
    words += ["--output-dir", tmp_path / "run", "--batch-size", "64"]
    done = helpers.python("-m", "accel_train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")
    assert list(found) == ["drill"] and found["drill"]["status"] == PASS
    assert list(tmp_path.iterdir()) == [tmp_path / "found.json"]  # the scratch folder is gone


@pytest.mark.slow
def test_a_drill_of_a_training_that_ends_by_itself_says_what_it_printed(tmp_path: Path) -> None:
    others = [check.name for check in CHECKS]
    words = ["doctor", "--drill", "--skip", *others, "--json", tmp_path / "found.json"]
    done = helpers.python("-m", "accel_train", *words, "--output-dir", tmp_path / "run", "--optim.lr", "1e30")
    assert done.returncode == 1, done.stdout + done.stderr
    found = findings(tmp_path / "found.json")["drill"]
    assert found["status"] == FAIL and "exit code" in found["measured"]
