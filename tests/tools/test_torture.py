"""What benchmarks/torture.py concludes from the records of its net, and that the records are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
from interrupted.history import Start, Step, kept_steps, missed_and_repeated, read_start


def step(*images: int, after: str, epoch: int | None = None) -> Step:
    return Step(images, 0.5, after, epoch)


def test_what_was_lost_is_not_kept() -> None:
    first = Start("w0", (step(0, 1, after="w1"), step(2, 3, after="w2"), step(0, 3, after="w3")))
    second = Start("w2", (step(0, 2, after="v3"),))  # it goes on after the second update
    nothing = Start("", ())  # it was killed before its first update
    third = Start("v3", (step(1, 3, after="v4"),))
    kept = kept_steps([first, second, nothing, third])
    assert [each.after for each in kept] == ["w1", "w2", "v3", "v4"]
    assert missed_and_repeated(kept, 4, 2) == (0, 0)


def test_a_start_from_the_beginning_keeps_nothing() -> None:
    first = Start("w0", (step(0, 1, after="w1"),))
    second = Start("w0", (step(2, 3, after="v1"), step(0, 1, after="v2")))
    assert [each.after for each in kept_steps([first, second])] == ["v1", "v2"]


def test_weights_that_no_start_had_are_an_error() -> None:
    with pytest.raises(ValueError, match="no earlier start"):
        kept_steps([Start("w0", (step(0, after="w1"),)), Start("x", (step(1, after="w2"),))])


def test_images_are_counted_in_their_epoch() -> None:
    told = [step(0, 1, after="a", epoch=0), step(1, 2, after="b", epoch=0), step(3, 3, after="c", epoch=1)]
    assert missed_and_repeated(told, 4, 2) == (1 + 3, 1 + 1)
    counted = [step(0, 1, after="a"), step(2, 3, after="b"), step(3, 2, after="c"), step(2, 0, after="d")]
    assert missed_and_repeated(counted, 4, 2) == (1, 1)


def test_a_step_is_put_together_from_all_processes(tmp_path: Path) -> None:
    def line(step: int, images: list[int], loss: float) -> str:
        return json.dumps({"step": step, "epoch": None, "images": images, "loss": loss}) + "\n"

    done = ['{"done": 1, "after": "w1"}\n', '{"do']  # killed while it was writing
    (tmp_path / "rank0.jsonl").write_text(
        line(1, [4, 5], 1.0) + '{"before": "w0"}\n' + done[0] + line(2, [1], 9) + done[1]
    )
    (tmp_path / "rank1.jsonl").write_text(line(1, [6, 7], 3.0) + line(2, [2], 9.0))
    assert read_start(tmp_path) == Start("w0", (Step((4, 5, 6, 7), 1.0, "w1"),))  # the second was not finished


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_are_killed_and_compared() -> None:
    """accel_train loses updates and nothing else; timm's recovery checkpoints leave images out."""
    script = helpers.ROOT / "benchmarks/torture.py"
    words = ["--quick", "--programs", "accel_train", "timm, recovery"]
    shown = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, env=helpers.environment())
    assert shown.returncode == 0, shown.stdout + shown.stderr
    own, other = (line.split()[-7:] for line in shown.stdout.splitlines()[-2:])
    assert [*map(int, own[:2]), *map(int, own[3:5])] == [0, 300, 0, 0] and int(own[2]) > 10
    assert float(own[5]) < 1e-5 and float(own[6]) < 1e-4
    assert int(other[3].replace(",", "")) > 0
