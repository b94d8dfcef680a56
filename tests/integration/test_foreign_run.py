"""Somebody else's run, with a byte copy of an installed module as its code: no command executes any of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import helpers
import pytest
import yaml

COMMANDS = """
import sys

import helpers
from accel_train import api, cli
from accel_train.errors import UserError

run, image, work = sys.argv[1:]
for words in (
    ["predict", run, image],
    ["evaluate", run],
    ["report", run],
    ["export", run, "--format", "pt2"],
    ["track", run, "--to", "tensorboard"],
    ["runs", run],
    ["bench", run],
    ["doctor", run],
    ["train", "digits", "--data.train-limit", "64", "--epochs", "1", "--model.weights", run, "--output-dir", "new"],
):
    print("CODE", words[0], cli.main(words), flush=True)
    helpers.forget_accelerate()
for name, call in (
    ("load_run", lambda: api.load_run(run)),
    ("api.evaluate", lambda: api.evaluate(run)),
):
    try:
        call()
        print("CODE", name, 0)
    except UserError:
        print("CODE", name, 2)
    helpers.forget_accelerate()
"""
TRAP = """
import pathlib

pathlib.Path({marker!r}).touch()


def call(*_, **__):
    pathlib.Path({marker!r}).touch()
"""


def hostile(run: Path, option: str, reference: str, source: Path, **more: Any) -> Path:
    """Make of `run` a run whose `option` names `reference`, with a byte copy of `source` as the code that it keeps."""
    group, _, name = option.partition(".")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config.setdefault(group, {}).update({name: reference, **more})
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    kept = f"code/{source.stem}-{digest[:12]}.py"
    (run / "code").mkdir(exist_ok=True)
    shutil.copy(source, run / kept)
    entry = {"reference": reference, "kept": kept, "sha256": digest, "imports": {}}
    before = json.loads((run / "code.json").read_text()) if (run / "code.json").exists() else {}
    (run / "code.json").write_text(json.dumps(before | {option: entry}))
    return run


def codes(run: Path, work: Path, *more: Path) -> dict[str, int]:
    """Use the run with every command, in one process. Returns the exit code of each. `more`: folders of modules."""
    work.mkdir()
    image = helpers.write_digits(work, 1)[0]
    path = ":".join(map(str, (helpers.ROOT, helpers.ROOT / "tests", *more)))
    done = helpers.python("-c", COMMANDS, run, image, work, cwd=work, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("CODE ")]
    return {name: int(code) for _, name, code in lines}


@pytest.mark.ci
def test_data_and_a_loss_that_are_installed_modules(digits_run: Path, tmp_path: Path) -> None:
    run, marker = Path(shutil.copytree(digits_run, tmp_path / "run")), tmp_path / "was-run"
    (tmp_path / "installed").mkdir()
    source = tmp_path / "installed/a_trap_of_the_tests.py"
    source.write_text(TRAP.format(marker=str(marker)))
    hostile(run, "data.name", f"{source.stem}:call", source)
    hostile(run, "loss.name", f"{source}:call", source)
    found = codes(run, tmp_path / "work", source.parent)
    assert not marker.exists()
    # What needs no data and no loss works.
    assert {name for name, code in found.items() if code} == {"bench", "doctor", "evaluate", "api.evaluate"}
