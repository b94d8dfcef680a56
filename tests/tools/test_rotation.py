"""A run is read while it trains: it saves and deletes its checkpoints as fast as it can."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest

from accel_train import cli
from accel_train.api import evaluate, load_run
from accel_train.checkpoint.directory import choose_checkpoint
from accel_train.checkpoint.reading import one_of_run

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

WRITER = """
import shutil, sys, time
from itertools import count
from pathlib import Path
from accel_train.checkpoint.directory import commit, delete_checkpoint

folder, original = Path(sys.argv[1]), Path(sys.argv[2])

def write(place):
    for file in original.iterdir():
        if file.name != "manifest.json":
            shutil.copyfile(file, place / file.name)

for update in count(1):
    commit(folder, update, write)
    if update > 1:
        delete_checkpoint(folder, update - 1)
    if update == 2:  # the first one is gone
        print("goes on", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def live(digits_run: Path, tmp_path: Path) -> Iterator[Path]:
    """A run without final weights that has one checkpoint at any time, for a tenth of a second."""
    run = Path(shutil.copytree(digits_run, tmp_path / "run"))
    original = sorted((run / "checkpoints").iterdir())[-1].rename(tmp_path / "original")
    shutil.rmtree(run / "checkpoints")
    for name in ("model.safetensors", "ema.safetensors", "result.json"):
        (run / name).unlink()
    (run / "checkpoints").mkdir()
    words = [sys.executable, "-c", WRITER, str(run / "checkpoints"), str(original)]
    with subprocess.Popen(words, env=helpers.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        try:
            yield run
            assert writer.poll() is None
        finally:
            writer.kill()


@pytest.mark.slow
def test_all_that_reads_a_run_reads_one_that_trains(
    live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = helpers.write_digits(tmp_path, 1)[0]
    folders = set()
    for _ in range(20):
        loaded = load_run(live)
        folders.add(loaded.weights.parent.name)
        assert one_of_run(live, name="model").file.name == "model.safetensors"  # as export does
        assert choose_checkpoint(live.parent / "other", str(live), []) is not None  # --resume RUN
    assert len(folders) > 1, "the checkpoints did not change"
    for number in range(2):
        found = evaluate(live).metrics["ema"]
        assert found["count"] == 359 and found["weights"].startswith("checkpoints/update-")
        page = live.parent / f"{number}.html"
        assert cli.main(["evaluate", str(live)]) == 0
        assert cli.main(["report", str(live), "--output", str(page)]) == 0
        assert "balanced accuracy" in page.read_text()
        assert load_run(live).predict([image])[0].classes
        assert cli.main(["predict", str(live), str(image)]) == 0
        assert cli.main(["runs", str(live.parent)]) == 0
    assert "not a complete checkpoint" not in capsys.readouterr().err


@pytest.mark.ci
def test_two_processes_read_the_same(live: Path) -> None:
    done = helpers.python("-m", "accel_train", "evaluate", live, processes=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((live / "evaluation-test.json").read_text())
    assert found["processes"] == 2 and found["ema"]["accuracy"] > 0.5
