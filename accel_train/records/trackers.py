"""Trackers: a run's curves, settings and result in TensorBoard, Weights & Biases or MLflow, by Accelerate's classes.

A run that is killed repeats the updates after its last checkpoint, and no value may appear twice. So a tracker gets a
step only when it is final: when a checkpoint of a later update, or of the finished epoch, is complete on the disk, or
the run is finished. All curves come from metrics.jsonl: the training and `accel-train track` send the same.

RUN/trackers.json keeps each tracker's id of the run, and the last step that was sent.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from filelock import FileLock, Timeout

from accel_train.checkpoint.directory import list_updates
from accel_train.config.compatibility import settings_of_run
from accel_train.config.options import parse
from accel_train.config.schema import Config
from accel_train.errors import UserError, nearest, reason_of
from accel_train.files import atomic_write
from accel_train.ownership.generation import read_result
from accel_train.ownership.owner import has_owner
from accel_train.records import events
from accel_train.records.events import Event
from accel_train.untrusted import is_count, is_number, read_json_lines, read_json_object

OF_THE_LINE = ("kind", "time", "epoch", "update", "seconds", "count", "generation")  # no curves
NAMES = {
    "lr": "lr",
    "images_per_second": "speed/images_per_second",
    "data_wait_fraction": "speed/data_wait_fraction",
}  # other values of a train line are train/NAME


@dataclass(frozen=True)
class Point:
    """The values of the curves at one update."""

    step: int
    epoch: int
    time: float
    """In seconds since 1970."""
    values: dict[str, float]

    def is_final(self, checkpoint: tuple[int, int]) -> bool:
        """Whether a run that resumes from `checkpoint` (its update, and the epoch that goes on) keeps this point.

        All lines of the step are written then: the evaluations of an epoch are, once the next epoch begins.
        """
        update, epoch = checkpoint
        return self.step < update or (self.step == update and self.epoch < epoch)


def point_of(line: Mapping[str, Any]) -> Point | None:
    """The point of a line of metrics.jsonl; None if the line has no curves."""
    if line.get("kind") not in ("train", "eval") or not is_count(line.get("update")):
        return None
    numbers = {name: value for name, value in numbers_in(line).items() if name not in OF_THE_LINE}
    if line["kind"] == "train":
        values = {NAMES.get(name, f"train/{name}"): value for name, value in numbers.items()}
    else:
        split = "train_epoch" if line.get("split") == "train" else line.get("split")
        weights = "_ema" if line.get("weights") == "ema" else ""
        values = {f"{split}{weights}/{name}": value for name, value in numbers.items()}
    epoch, time = line.get("epoch", 0), line.get("time", 0.0)
    return Point(line["update"], epoch if is_count(epoch) else 0, float(time) if is_number(time) else 0.0, values)


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among some values: neither null, as which JSON keeps NaN, nor true and false."""
    return {
        name: value for name, value in values.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def read_curves(run: Path) -> tuple[list[Point], dict[int, int]]:
    """The points of a run's metrics.jsonl, one for each update, and the checkpoints that it names: see `saves_in`."""
    lines = list(read_json_lines(run / "metrics.jsonl"))
    found: dict[int, Point] = {}
    for line in lines:
        if (point := point_of(line)) is not None:
            add_point(found, point)
    return [found[step] for step in sorted(found)], saves_in(lines)


def add_point(points: dict[int, Point], point: Point) -> None:
    """Add `point` to `points`, which are by their steps; lines of the same update become one point."""
    before = points.get(point.step)
    values = point.values if before is None else before.values | point.values
    points[point.step] = Point(point.step, point.epoch, point.time, values)


def saves_in(lines: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    """The checkpoints that metrics.jsonl names: update -> the epoch that goes on after it."""
    return {
        line["update"]: line["epoch"]
        for line in lines
        if line.get("kind") == "checkpoint" and isinstance(line.get("update"), int) and "epoch" in line
    }


FILE = "trackers.json"
NOTHING = -1  # the step before all steps


class Memory:
    """What RUN/trackers.json keeps of one tracker: the "id" of the run there, and the last step that was "sent"."""

    _lock = threading.Lock()  # all trackers of a run share the file

    def __init__(self, run: Path, name: str) -> None:
        self.path, self.name = run / FILE, name
        self.values: dict[str, Any] = self._read().get(name, {})

    def _read(self) -> dict[str, Any]:
        return {key: value for key, value in read_json_object(self.path).items() if isinstance(value, dict)}

    @property
    def sent(self) -> int:
        sent = self.values.get("sent")
        return sent if isinstance(sent, int) else NOTHING

    @property
    def id(self) -> str | None:
        id = self.values.get("id")
        return id if isinstance(id, str) else None

    def keep(self, **values: Any) -> None:
        """Keep these values too."""
        self._write(self.values | values)

    def forget(self) -> None:
        self._write({})

    def _write(self, values: dict[str, Any]) -> None:
        if values != self.values:
            self.values = values
            with self._lock:
                atomic_write(self.path, json.dumps(self._read() | {self.name: values}, indent=2) + "\n", durable=False)


class Service:
    """A tracker that never gets a step twice, and only final ones.

    "sent" is written before a step is sent, so that a kill in between loses a step rather than repeats it.
    """

    def __init__(self, name: str, config: Config, run: Path) -> None:
        self.name, self.run = name, run.resolve()
        self.project = config.recipe or "accel-train"
        self.settings = {**settings_of_run(config), "recipe": config.recipe}
        self.memory = Memory(run, name)
        self.last = self.memory.sent  # the newest step that the tracker has
        self.tracker: GeneralTracker

    def begin(self) -> None:
        """Start the tracker."""
        raise NotImplementedError

    def _start(self, **options: Any) -> None:
        create: Any = LOGGER_TYPE_TO_CLASS[self.name]
        folder = (self.run,) if create.requires_logging_directory else ()
        self.tracker = create(self.project, *folder, **options)
        self.tracker.start()

    def send(self, points: Sequence[Point]) -> None:
        """Log those of the final points that are new."""
        for point in points:
            if point.step > self.last:
                self.last = point.step
                self.memory.keep(sent=point.step)
                self._log(point)

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values, step=point.step)

    def finish(self, result: Mapping[str, Any], when: float) -> None:
        """Log the figures of result.json, of the time `when`. They may be there."""
        if self.memory.values.get("result") != result["updates"]:
            self.memory.keep(result=result["updates"])
            values = {f"result/{name}": value for name, value in numbers_in(result).items()}
            self._log(Point(result["updates"], 0, when, values))

    def close(self) -> None:
        self.tracker.finish()


class TensorBoard(Service):
    """Files in RUN/tensorboard, which anybody may read at any time. A new file replaces the steps of older ones from a
    given one on. So "sent" is written after the steps: what a kill makes come twice is shown once."""

    def __init__(self, name: str, config: Config, run: Path) -> None:
        super().__init__(name, config, run)
        self.project = "tensorboard"  # the name of the folder

    def begin(self) -> None:
        self._start(purge_step=self.last + 1)
        kinds = (bool, int, float, str)
        settings = self.settings.items()
        self.tracker.store_init_configuration({k: v if isinstance(v, kinds) else str(v) for k, v in settings})

    def send(self, points: Sequence[Point]) -> None:
        new = [point for point in points if point.step > self.last]
        for point in new:
            self._log(point)
        if new:
            self.last = new[-1].step
            self.memory.keep(sent=self.last)

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values, step=point.step, walltime=point.time)


class WandB(Service):
    """One run at Weights & Biases, whose id is chosen here. Its server knows the last step; without it, "sent" does."""

    def begin(self) -> None:
        if self.memory.id is None:
            self.memory.keep(id=uuid.uuid4().hex[:16])  # before the start: a kill in between leaves one run
        self.project = os.environ.get("WANDB_PROJECT", self.project)
        if threading.current_thread() is not threading.main_thread():
            self._check_key()
        self._start(
            id=self.memory.id,
            resume="allow",
            name=os.environ.get("WANDB_NAME", self.run.name),
            dir=os.environ.get("WANDB_DIR", str(self.run)),
        )
        if not self.tracker.tracker.offline:
            self.last = self.tracker.tracker.starting_step - 1
        self.tracker.store_init_configuration(self.settings)

    def _check_key(self) -> None:
        """Raise PermissionError if wandb.init would ask for a key: the terminal shows the training meanwhile."""
        import wandb

        asks = sys.stdin.isatty() and sys.stderr.isatty() and wandb.setup().settings.mode == "online"
        if asks and "prompt" in signature(wandb.login).parameters and not wandb.login(prompt=False, verify=False):
            raise PermissionError("there is no API key; use `wandb login`, or WANDB_MODE=offline")

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values | {"_timestamp": point.time}, step=point.step)

    def finish(self, result: Mapping[str, Any], when: float) -> None:
        self.tracker.tracker.summary.update(numbers_in(result))


class MLflow(Service):
    """One run of MLflow, whose id the server chooses."""

    def begin(self) -> None:
        known = self.memory.id
        self._start(run_id=known, run_name=self.run.name)
        if known is None:
            self.memory.keep(id=self.tracker.tracker.info.run_id)
            self.tracker.store_init_configuration(self.settings)  # they cannot be changed

    def _log(self, point: Point) -> None:
        import mlflow  # not through the tracker: that of older versions of Accelerate takes no time

        mlflow.log_metrics(point.values, step=point.step, timestamp=int(point.time * 1000))


SERVICES: dict[str, type[Service]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_trackers(names: Sequence[str], option: str = "--trackers") -> None:
    """Raise UserError for an unknown tracker, or one without its package, which Accelerate would silently skip."""
    from accelerate.tracking import get_available_trackers

    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in SERVICES:
            known = ", ".join(SERVICES)
            raise UserError(f"{option}: unknown tracker {name!r}.{nearest(name, SERVICES)} Known are {known}.")
        if name not in available:
            raise UserError(f"{option}: the package of {name!r} is not installed (pip install {name}).")


PAUSE_SECONDS = 5.0  # between two looks at metrics.jsonl: checkpoints may come fast, and the file may be long
END_SECONDS = 60.0  # how long a finished run waits for its trackers
STOP_SECONDS = 15.0  # how long a stopped one does: its job may be killed soon


def send_final(run: Path, service: Service) -> tuple[int, int]:
    """Send what is final and new; return how many steps are final, and how many are not yet."""
    # The checkpoints and the result first: what they make final is in the lines that are read after them.
    result, updates = read_result(run), list_updates(run / "checkpoints")
    is_finished = isinstance(result.get("updates"), int)
    points, saves = read_curves(run)
    position = (updates[-1], saves.get(updates[-1], 0)) if updates else (0, 0)
    final = [point for point in points if is_finished or point.is_final(position)]
    service.send(final)
    if is_finished:
        service.finish(result, (run / "result.json").stat().st_mtime)
    return len(final), len(points) - len(final)


class Sender(threading.Thread):
    """Does the work of one tracker in its own thread, because its server may be slow or unreachable."""

    def __init__(self, service: Service, run: Path) -> None:
        super().__init__(name=f"tracker {service.name}", daemon=True)
        self.service, self.folder = service, run
        self.failure: Exception | None = None
        self._asked, self._ending = threading.Event(), threading.Event()

    def ask(self) -> None:
        """Let it look for what is final now."""
        self._asked.set()

    def end(self) -> None:
        """Let it look once more, and end."""
        self._ending.set()
        self._asked.set()

    def run(self) -> None:
        try:
            self.service.begin()
            is_ending = False
            while not is_ending:
                self._asked.wait()
                self._asked.clear()
                is_ending = self._ending.is_set()
                send_final(self.folder, self.service)
                self._ending.wait(PAUSE_SECONDS)
            self.service.close()
        except Exception as error:
            self.failure = error


class Trackers:
    """The trackers of a run, on its main process. Its methods return at once, but for `end`."""

    def __init__(self, config: Config, run: Path) -> None:
        self.config, self.run = config, run
        self._senders: list[Sender] = []
        self._warned: set[str] = set()

    def handle(self, event: Event) -> Sequence[str]:
        """Send what an event has made final; return warnings."""
        match event:
            case events.UpdateDone():
                return self.warnings()
            case events.Started():
                self.begin(resumed=event.resumed)
            case events.SaveCommitted():
                self.ask()
            case events.Ended() if event.result is not None:
                return self.end(END_SECONDS)
            case events.Closed():
                return self.end(STOP_SECONDS)
        return ()

    def begin(self, *, resumed: bool) -> None:
        """Start the trackers."""
        for name in dict.fromkeys(self.config.trackers):
            if not resumed:
                Memory(self.run, name).forget()  # a new run in the directory of an old one
            sender = Sender(SERVICES[name](name, self.config, self.run), self.run)
            sender.ask()
            sender.start()
            self._senders.append(sender)

    def ask(self) -> None:
        for sender in self._senders:
            sender.ask()

    def warnings(self) -> list[str]:
        """A warning for each tracker that has failed since the last call."""
        failed = {s.service.name: s.failure for s in self._senders if s.failure and s.service.name not in self._warned}
        self._warned |= failed.keys()
        return [
            f"the tracker {name} has failed: {reason_of(error)}. The training goes on without it; "
            f"`accel-train track {shlex.quote(str(self.run))} --to {name}` sends its curves later."
            for name, error in failed.items()
        ]

    def end(self, seconds: float) -> list[str]:
        """End the trackers within this time. Returns warnings."""
        deadline = time.monotonic() + seconds
        for sender in self._senders:
            sender.end()
        late = []
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
            if sender.is_alive():
                name = sender.service.name
                late.append(
                    f"the tracker {name} is still sending; the run ends without waiting for it. "
                    f"`accel-train track {shlex.quote(str(self.run))} --to {name}` sends the rest."
                )
        warnings = [*self.warnings(), *late]
        self._senders = []
        return warnings


def track(run: Path, name: str) -> str:
    """Send what is new of the run in the folder `run` to the tracker `name`. Returns how much that was, in words.

    Raises UserError if the run, while it trains, sends to this tracker itself, or if the tracker fails.
    """
    from accelerate import PartialState

    config = parse([str(run / "config.yaml")], checks_code=False)
    check_trackers([name], "--to")
    if name in config.trackers and has_owner(run):
        raise UserError(f"{run} is training, and sends its curves to {name} itself.")
    PartialState(cpu=True)  # Accelerate's trackers ask it which process they are on
    try:
        with FileLock(run / ".trackers.lock", timeout=0):
            final, rest = _send_once(run, SERVICES[name](name, config, run))
    except Timeout:
        raise UserError(f"Another process is sending the curves of {run}; try again later.") from None
    except OSError as error:
        raise UserError(f"{run}: cannot be read or written ({error.strerror}).") from error
    waits = f"; {rest} newer steps can be sent after the next checkpoint" if rest else ""
    return f"{name}: sent the curves of {run}, {final} steps{waits}"


def _send_once(run: Path, service: Service) -> tuple[int, int]:
    try:
        service.begin()
        counts = send_final(run, service)
        service.close()
    except Exception as error:  # of the tracker's package
        raise UserError(f"{service.name}: {reason_of(error)}. Start it again to send the rest.", code=1) from error
    return counts
