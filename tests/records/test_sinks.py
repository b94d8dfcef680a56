"""Who is told what happens, in which order, and that a kill between two of them costs nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import helpers
import pytest
import torch
from safetensors.torch import load_file

from accel_train.config.schema import Config
from accel_train.records.cost import read_starts
from accel_train.records.directory import RunDirectory
from accel_train.records.events import (
    Event,
    MetricsLines,
    Noted,
    Status,
    Stream,
    Warned,
)
from accel_train.records.trackers import Trackers
from accel_train.run.run import create_sinks

# What the package itself does, with a sink more that ends the process by SIGKILL. The sinks are told of each
# update, and the ledger is written then.
KILLED = """
import os, signal, sys
from accel_train.cli import main
from accel_train.records import events
from accel_train.records import cost as ledger
from accel_train.run import run
kind, place, count = getattr(events, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
create, ledger.STATUS_SECONDS, run.TELL_SECONDS = run.create_sinks, 0.0, 0.0

class Killer:
    left = count
    def handle(self, event):
        if isinstance(event, kind):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return ()

def with_killer(*arguments):
    sinks = create(*arguments)
    return [*sinks[:place], Killer(), *sinks[place:]]

run.create_sinks = with_killer
sys.exit(main(["train", *sys.argv[4:]]))
"""
UPDATES = 20
OPTIONS = """
digits --epochs 2 --data.train-limit 480 --data.val-fraction 0.1 --log-every-updates 2 --checkpoint.every-updates 5
--trackers tensorboard
""".split()  # noqa: SIM905
TIMES = ("time", "seconds", "images_per_second", "data_wait_fraction", "generation")


def lines(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in helpers.lines_of(run)]


def figures(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run) if line["kind"] in ("train", "eval")]


def train(kind: str, last: str, count: int, run: Path, *options: str) -> int:
    words = [kind, str(SINKS.index(last) + 1), str(count), *OPTIONS, *options, "--output-dir", str(run)]
    return helpers.python("-c", KILLED, *words).returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole")
    assert train("UpdateDone", "metrics.jsonl", 0, run) == 0
    return run


SINKS = ("metrics.jsonl", "status.json", "trackers", "console", "ledger")
ALL = [
    (kind, last, count)
    for kind, count in {
        "Started": 1, "UpdateDone": 8, "Logged": 7, "Evaluated": 2, "SaveBegun": 2, "SaveCommitted": 2, "Ended": 1,
    }.items()
    for last in SINKS
]  # fmt: skip
SOME = {
    ("UpdateDone", "console"), ("Logged", "metrics.jsonl"), ("Evaluated", "trackers"), ("SaveBegun", "status.json"),
    ("SaveCommitted", "status.json"), ("Ended", "metrics.jsonl"),
}  # fmt: skip


def test_a_start_notes_another_precision_and_a_best_checkpoint_that_is_gone(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink()
    environment = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(environment | {"precision": "bf16"}))
    best = json.loads((whole / "result.json").read_text())["best_update"]
    for path in (run / "checkpoints").iterdir():
        if path.name != f"update-{UPDATES:08d}":
            shutil.rmtree(path)
    assert train("UpdateDone", "metrics.jsonl", 0, run) == 0
    texts = [line["text"] for line in lines(run) if line["kind"] == "event"]
    assert sum("goes on in fp32 (bf16 before)" in text for text in texts) == 1
    assert sum(f"best checkpoint so far, that of update {best}, is not in" in text for text in texts) == (
        best != UPDATES
    )


@pytest.mark.parametrize(
    ("kind", "last", "count"),
    [pytest.param(*case, marks=[] if case[:2] in SOME else pytest.mark.slow) for case in ALL],
)
def test_a_kill_between_two_sinks_loses_and_repeats_nothing(
    tmp_path: Path, whole: Path, kind: str, last: str, count: int
) -> None:
    """`last` is the last sink that has handled the event."""
    assert train(kind, last, count, tmp_path) == -9
    assert train("UpdateDone", "metrics.jsonl", 0, tmp_path) == 0
    assert figures(tmp_path) == figures(whole)
    status = json.loads((tmp_path / "status.json").read_text())
    if (kind, last) != ("Ended", "metrics.jsonl"):  # result.json, which is written first, says it then
        assert (status["state"], status["update"], status["last_checkpoint"]) == ("finished", UPDATES, UPDATES)
    saved = [line["update"] for line in lines(tmp_path) if line["kind"] == "checkpoint"]
    assert saved.count(UPDATES) <= 1  # none, if it was killed between the save and its line
    starts = read_starts(tmp_path)
    assert sum(start.last_update - start.first_update for start in starts) == UPDATES
    for start in starts:
        phases = ("starting", "training", "evaluating", "saving", "repeated")
        spent = sum(getattr(start, phase) for phase in phases)
        assert spent == pytest.approx(start.ended - start.began, abs=0.2)
    weights, expected = (load_file(run / "model.safetensors") for run in (tmp_path, whole))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


class Listener:
    """Notes what it is told, and warns of what it is told to warn of."""

    def __init__(self, heard: list[tuple[str, Event]], name: str, warns_of: type[Event] | None = None) -> None:
        self.heard, self.name, self.warns_of = heard, name, warns_of

    def handle(self, event: Event) -> Sequence[str]:
        self.heard.append((self.name, event))
        return [f"{self.name} is full"] if type(event) is self.warns_of else []


def test_an_event_reaches_all_sinks_before_the_warnings_that_it_causes() -> None:
    heard: list[tuple[str, Event]] = []
    stream = Stream([Listener(heard, "first", Noted), Listener(heard, "second")])
    stream.emit(Noted("begins"))
    assert [(name, type(event)) for name, event in heard] == [
        ("first", Noted), ("second", Noted), ("first", Warned), ("second", Warned)
    ]  # fmt: skip
    assert heard[-1][1] == Warned("first is full", time=heard[-1][1].time)


def test_the_order_is_the_declared_one(tmp_path: Path) -> None:
    setup: Any = SimpleNamespace(config=Config(trackers=("tensorboard",)))
    others = Mock(), Mock(), [object()], Mock()
    sinks = create_sinks(setup, RunDirectory(tmp_path, writes=True), *others)
    assert [type(sink) for sink in sinks[:3]] == [MetricsLines, Status, Trackers] and sinks[3:5] == [*others[:2]]
    assert create_sinks(setup, RunDirectory(tmp_path, writes=False), *others) == []  # another process's
