"""torch.compile (`accelerate launch --dynamo_backend`) does not change the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import helpers
import pytest

# Two processes, two micro-batches an update; a backend of torch.compile that is quick to compile.
RUN = """
    digits --epochs 1 --batch-size 16 --micro-batch-size 4 --data.train-limit 96 --data.test-limit 32
    --log-every-updates 1 --ema.enabled true --optim.clip 1
""".split()  # noqa: SIM905
COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}  # as accelerate launch --dynamo_backend sets it


def train(run: Path, **variables: str) -> str:
    line = ("tests/compile_worker.py", *RUN, "--output-dir", run)
    done = helpers.python(*line, processes=2, cwd=helpers.ROOT, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("compiled Sequential" in done.stdout) == bool(variables)
    return done.stdout


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.ci
def test_compiled_or_not_is_the_same_run_and_one_all_reduce_an_update(tmp_path: Path) -> None:
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    assert re.findall(r"all-reduces: (\d+)", train(plain)) == ["6", "6"]
    compiled.mkdir()
    (compiled / "STOP").touch()
    first = re.findall(r"all-reduces: (\d+)", train(compiled, **COMPILED))  # goes on without compilation
    (stopped,) = (
        line["update"]
        for line in map(json.loads, (compiled / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "checkpoint"
    )
    assert first == [str(stopped)] * 2
    assert re.findall(r"all-reduces: (\d+)", train(compiled)) == [str(6 - stopped)] * 2
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
