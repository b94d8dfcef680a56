"""An interrupted run ends like an uninterrupted one: bitwise equal on as many processes, else within rounding."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

# All that could lose its place: augmentation in worker processes, dropout, stochastic depth, BatchNorm, the running
# mean of the weights, a schedule, clipping, accumulation, an optimizer with two moments.
OPTIONS = """
digits --log-every-updates 1 --checkpoint.every-updates 2 --micro-batch-size 12 --data.workers 1
--augment.policy trivialaugment --augment.flip 0.5 --augment.erase 0.2 --augment.mixup 0.2
--model.name test_resnet --model.dropout 0.2 --model.drop-path 0.1 --virtual-batch-size 12
--ema.enabled true --ema.decay 0.9 --optim.name adamw --optim.lr 0.002 --optim.clip 1
""".split()  # noqa: SIM905
TIMES = {
    "time", "seconds", "images_per_second", "data_wait_fraction", "train_seconds", "timed_samples", "wall_seconds",
    "warm_up_seconds", "world_size", "division", "cost", "generation",
}  # fmt: skip


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of one kind, without times and speeds."""
    path = run / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in found if line["kind"] == kind]


def updates_done(run: Path) -> int:
    # Read once: a start that goes on removes the lines of what it will do again.
    found = lines(run, "train") if (run / "metrics.jsonl").exists() else []
    return found[-1]["update"] if found else 0


def killed_and_restarted(run: Path, *words: object, processes: Sequence[int], kills: int, seed: int) -> int:
    """Start the run, kill all of its processes, start it again, …, and let the last one end; in turn on so many
    processes.

    Half of the kills come at any moment from the start on, or up to a second after the first update; the others while
    a checkpoint is being written. Returns how many of them left a torn one behind.
    """
    chance, torn = random.Random(seed), 0
    for number in range(kills):
        with helpers.started(run, *words, processes=processes[number % len(processes)]) as started:
            done = updates_done(run)
            if number % 8 == 7:
                time.sleep(chance.uniform(0, 8))
            else:
                started.until(lambda done=done: updates_done(run) > done, timeout=200)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 0.5))
                if number % 2:
                    deadline = time.monotonic() + 20
                    while not list(run.glob("checkpoints/.update-*.tmp/*")) and time.monotonic() < deadline:
                        time.sleep(0.0005)
            assert started.popen.poll() is None, started.output  # it is really killed, not at its end already
        torn += bool(list(run.glob("checkpoints/.update-*.tmp")))
    done = helpers.run(*words, "--output-dir", run, processes=processes[kills % len(processes)], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return torn


def assert_bitwise_equal(run: Path, whole: Path) -> None:
    for kind in ("train", "eval"):
        found = lines(run, kind)
        assert found == lines(whole, kind)
        places = [(line["update"], line.get("split"), line.get("weights")) for line in found]
        assert len(set(places)) == len(places)  # each update and each evaluation is told of once
    for weights in ("model.safetensors", "ema.safetensors"):
        assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, whole)]
    found, expected = ({k: v for k, v in result.items() if k not in TIMES} for result in results)
    assert found == expected
    name = f"checkpoints/update-{expected['updates']:08d}"
    states = [torch.load(folder / name / "optimizer.pt", weights_only=True) for folder in (run, whole)]
    assert_same(*states)
    positions = [json.loads((folder / name / "state.json").read_text())["train"] for folder in (run, whole)]
    assert positions[0] | dict.fromkeys(TIMES) == positions[1] | dict.fromkeys(TIMES)
    assert not list(run.glob("checkpoints/*broken*"))  # a kill leaves no checkpoint that looks whole and is not


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_killed_on_changing_numbers_of_processes_it_ends_bitwise_equal(tmp_path: Path) -> None:
    """With all that could lose its place; siege/test_siege_of_runs.py kills more often, and not only kills."""
    words = (*OPTIONS, "--epochs", 2, "--bitwise", "true")
    whole, run = tmp_path / "whole", tmp_path / "run"
    # Several processes under the real launcher, unlike those that are killed.
    done = helpers.run(*words, "--output-dir", whole, processes=2, timeout=600, launcher=True)
    assert done.returncode == 0, done.stdout + done.stderr
    killed_and_restarted(run, *words, processes=[2, 3, 1], kills=3, seed=3)
    assert_bitwise_equal(run, whole)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("launcher", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_then_one_then_four(tmp_path: Path, launcher: bool) -> None:
    """No dropout and no BatchNorm here: what remains is the order in which floats are added."""
    # A small learning rate: rounding errors grow with the steps that are taken.
    words = ("digits", "--epochs", 2, "--batch-size", 24, "--optim.lr", 0.01)
    words += ("--log-every-updates", 1, "--checkpoint.keep", 9)
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = helpers.run(*words, "--output-dir", whole)
    assert done.returncode == 0, done.stdout + done.stderr
    stops = []
    for processes in (2, 1):
        with helpers.started(run, *words, processes=processes, launcher=launcher and processes == 2) as started:
            before = updates_done(run)
            started.until(lambda before=before: updates_done(run) > before + 8, timeout=200)  # type: ignore[misc]
            os.kill(started.pids()[-1], signal.SIGTERM)
            assert started.ended() == 0, started.output  # of all processes: the launcher's own is 1 if one is not 0
            assert started.status["state"] == "interrupted"
            stops.append(started.status["update"])
    done = helpers.run(*words, "--output-dir", run, processes=4, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr

    assert 0 < stops[0] < stops[1] < 120
    assert any(stop % 60 for stop in stops)  # in the middle of an epoch
    states = {path.parent.name: json.loads(path.read_text()) for path in run.glob("checkpoints/*/state.json")}
    for stop, processes in zip(stops, (2, 1), strict=True):
        state = states[f"update-{stop:08d}"]
        assert state["processes"] == processes
        assert state["train"]["samples_seen"] == stop // 60 * 1438 + stop % 60 * 24
    assert states["update-00000120"]["train"]["samples_seen"] == 2 * 1438
    assert states["update-00000120"]["processes"] == 4

    found, expected = lines(run, "train"), lines(whole, "train")
    assert [line["update"] for line in found] == list(range(1, 121))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    first, last = (sum(line["loss"] for line in part) / 20 for part in (found[:20], found[-20:]))
    assert first > last + 0.1  # it learns
    epochs = [line for line in lines(run, "eval") if line["split"] == "train"]
    assert [line["count"] for line in epochs] == [1438, 1438]  # each sample once, and none lost
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, whole)]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], rel=1e-5)


# What the package itself does, with a sink more that ends the process by a signal when it is told of an event, and here
# it is told of each update.
STRUCK = """
import os, signal, sys
from accel_train.cli import main
from accel_train.run import run
number, kinds, update, name = int(sys.argv[1]), sys.argv[2].split(" or "), int(sys.argv[3]), sys.argv[4]
create, run.TELL_SECONDS = run.create_sinks, 0.0

class Striker:
    def handle(self, event):
        if type(event).__name__ in kinds and event.update == update and getattr(event, "name", "") == name:
            os.kill(os.getpid(), number)
        return ()

run.create_sinks = lambda *arguments: [*create(*arguments), Striker()]
sys.exit(main(["train", *sys.argv[5:]]))
"""
# 3 updates an epoch. The body is frozen and the EMA copies the weights for 2 epochs; the rate decays after epochs 5 and
# 6; epoch 4 was the best, and the patience ends the run after 7.
ENDS = """
digits --data.train-limit 144 --data.val-fraction 0.1 --epochs 12 --batch-size 48 --virtual-batch-size 12
--log-every-updates 1 --checkpoint.keep 50 --model.name test_resnet --optim.lr 0.5 --optim.clip 1
--model.freeze-body true --model.freeze-epochs 2 --ema.enabled true --ema.decay 0.5 --ema.after-epochs 2
--schedule.name plateau --schedule.patience-epochs 0 --schedule.decay 0.5 --stop.patience-epochs 3 --best-metric loss
""".split()  # noqa: SIM905
FIRST_AND_LAST = [update for epoch in range(7) for update in (3 * epoch + 1, 3 * epoch + 3)]
LAST = FIRST_AND_LAST[1::2]
STRIKES = {
    "stopped": [(signal.SIGTERM, "Started or UpdateDone", update - 1, "") for update in FIRST_AND_LAST],
    "killed": [(signal.SIGKILL, "UpdateDone", update, "") for update in FIRST_AND_LAST],
    "killed while it evaluates": [
        (signal.SIGKILL, "Evaluated", update, name) for update in LAST for name in ("train", "val", "val (ema)")
    ],
    "killed while it saves": [
        (signal.SIGKILL, kind, update, "") for update in LAST for kind in ("SaveBegun", "SaveCommitted")
    ],
}


@pytest.fixture(scope="module")
def whole_with_ends(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("ends") / "whole"
    done = helpers.run(*ENDS, "--output-dir", run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize(
    ("how", "every_update"),
    [
        pytest.param(how, every, marks=pytest.mark.ci if (how, every) == ("killed", False) else pytest.mark.slow)
        for how in STRIKES
        for every in (False, True)
    ],
)
def test_ended_again_and_again_around_epochs_ends_it_ends_bitwise_equal(
    tmp_path: Path, whole_with_ends: Path, how: str, every_update: bool
) -> None:
    run = tmp_path / "run"
    words = [*ENDS, "--output-dir", str(run), *["--checkpoint.every-updates", "1"] * every_update]
    struck = 0
    for number, kinds, update, name in STRIKES[how]:
        ended = helpers.python("-c", STRUCK, number.value, kinds, update, name, *words)
        assert ended.returncode in ((0,) if number == signal.SIGTERM else (0, -9)), ended.stderr
        struck += not (run / "result.json").exists()
    assert struck >= len(STRIKES[how]) - 4  # the last ones may come after the end
    done = helpers.run(*words)
    assert done.returncode == 0, done.stderr
    assert_bitwise_equal(run, whole_with_ends)
