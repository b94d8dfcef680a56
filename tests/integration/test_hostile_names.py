"""Names of classes and files that are commands to a terminal: none of them reaches it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import helpers
import pytest
from PIL import Image

from accel_train.errors import COMMANDS

CLEAR = "\x1b[2J\x1b]0;owned\x07"
CLASSES = [f"cat{CLEAR}\u202etac\nforged: 100 %", "قطة 👩\u200d👩\u200d👧 é"]
PROGRAM = """
import json
import sys

import helpers
from accel_train import cli

for line in json.loads(sys.argv[1]):
    print("CODE", line[0], cli.main(line), flush=True)
    helpers.forget_accelerate()
"""


def used(folder: Path, *lines: list[str]) -> str:
    """Run commands in one process and return all that they print."""
    path = f"{helpers.ROOT}:{helpers.ROOT / 'tests'}"
    done = helpers.python("-c", PROGRAM, json.dumps(lines), cwd=folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_harmless(printed: str) -> None:
    assert not COMMANDS.search(printed.replace("\n", "")), repr(printed)
    assert not any(line.startswith("forged") for line in printed.splitlines()), printed


@pytest.mark.ci
def test_no_command_prints_a_name_as_it_is(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for number in range(24):
        file = photos / ("train", "test")[number % 3 == 0] / CLASSES[number % 2] / f"{number}{CLEAR}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 12), 100 * (number % 2) + number).save(file)
    broken = photos / f"broken{CLEAR}\n.png"
    broken.write_bytes(b"no image")
    recipe = "mnist_cnn --epochs 1 --batch-size 8 --data.name folder --data.root photos --data.channels 1"
    printed = used(
        tmp_path,
        ["train", *recipe.split(), "--model.image-size", "12", "--data.workers", "0", "--output-dir", "run"],
        ["evaluate", "run"],
        ["predict", "run", "photos/test", str(broken)],
        ["report", "run"],
        ["check-data", "folder", "--data.root", "photos", "--output", "list.txt"],
        ["evaluate", "run", "--data.name", CLASSES[0]],
        ["train", f"no recipe{CLEAR}"],
        ["runs", "."],
    )
    assert_harmless(printed)
    codes = [line.split()[1:] for line in printed.splitlines() if line.startswith("CODE")]
    assert codes == [["train", "0"], ["evaluate", "0"], ["predict", "1"], ["report", "0"], ["check-data", "0"],
                     ["evaluate", "2"], ["train", "2"], ["runs", "0"]]  # fmt: skip
    for name in ("cat\\x1b[2J\\x1b]0;owned\\x07\\u202etac\\nforged: 100 %", CLASSES[1], "broken\\x1b[2J"):
        assert name in printed
    page = (tmp_path / "run/report.html").read_text()
    assert "\x1b" not in page
    assert CLASSES[1] in page

    # The texts of a run may be anybody's.
    values = json.loads((tmp_path / "run/model.json").read_text())
    lines = []
    for number, change in enumerate(({"classes": [CLEAR] * 3}, {"mean": [CLEAR]}, {"origin": {CLEAR: 1}})):
        shutil.copytree(tmp_path / "run", tmp_path / f"run-{number}")
        (tmp_path / f"run-{number}/model.json").write_text(json.dumps(values | change))
        lines += [["predict", f"run-{number}", "photos/test"], ["evaluate", f"run-{number}"]]
    assert_harmless(used(tmp_path, *lines))
