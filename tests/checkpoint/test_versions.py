"""Runs and checkpoints of another format, and of other machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_hostile import edit_state

from accel_train.cli import main
from accel_train.config.compatibility import FORMAT

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

TINY = (
    "digits --data.name synthetic --data.train-limit 48 --data.test-limit 16 --model.image-size 32 --batch-size 16 "
    "--log-every-updates 1"
)


def train(run: Path, words: str) -> int:
    return main(["train", *words.split(), "--output-dir", str(run)])


def interrupted(run: Path, words: str, **state: Any) -> None:
    """A run of one epoch whose checkpoints are changed and which is not finished."""
    assert train(run, f"{words} --epochs 1") == 0
    (run / "result.json").unlink()
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        edit_state(checkpoint, lambda values: values.update(state))


def more(words: str) -> str:
    return f"{words} --epochs 2 --allow-change epochs"


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1, None, str(FORMAT)])
def test_another_format_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: object
) -> None:
    """Of a checkpoint, of a result, and of a run that is evaluated."""
    run = tmp_path / "run"
    assert train(run, f"{TINY} --epochs 1") == 0
    capsys.readouterr()

    def change(values: dict[str, Any]) -> None:
        values["format"] = number
        if number is None:
            del values["format"]
        if "versions" in values:
            values["versions"]["accel-train"] = "0.1"
        else:
            values["version"] = "0.1"

    for name in ("model.json", "result.json", "state.json"):
        if name == "state.json":
            for checkpoint in sorted((run / "checkpoints").iterdir()):
                edit_state(checkpoint, change)
        else:
            values = json.loads((run / name).read_text())
            change(values)
            (run / name).write_text(json.dumps(values))
        assert (main(["evaluate", str(run)]) if name == "model.json" else train(run, more(TINY))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{name} was written by accel-train 0.1, whose runs this one" in line
        assert "train a new run with another --output-dir" in line
        if name == "result.json":
            (run / name).unlink()


@pytest.mark.ci
def test_a_bitwise_run_says_what_its_bits_depend_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = tmp_path / "run", f"{TINY} --bitwise true"
    interrupted(run, words)
    state = run / "checkpoints" / "update-00000003" / "state.json"
    bits = json.loads(state.read_text())["bits"]
    assert bits["device"] == "cpu"
    assert bits["precision"] == "fp32"
    assert int(bits["threads of a process"]) >= 1
    edit_state(state.parent, lambda values: values["bits"].update({"threads of a process": "3"}))
    assert train(run, more(words)) == 0
    now = bits["threads of a process"]
    assert f"threads of a process 3 -> {now}: from here on the bits may be others" in capsys.readouterr().err


def test_bits_that_are_no_table_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = tmp_path / "run", f"{TINY} --bitwise true"
    interrupted(run, words, bits="some")
    assert train(run, more(words)) == 2
    assert "state.json matches its checksum, but it is not a file of this program" in capsys.readouterr().err
