"""Trackers: a run's curves and settings in TensorBoard, Weights & Biases or MLflow, by Accelerate's classes.

A run that is killed repeats the updates after its last checkpoint, and no value may appear twice. So a tracker gets a
step only when it is final: when a checkpoint of a later update, or of the finished epoch, is complete on the disk, or
the run is finished. `send_final` sends that, from metrics.jsonl: in a thread of the training, and for `accel-train
track`. RUN/trackers.json keeps each tracker's id of the run, and the last step that was sent.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from filelock import FileLock, Timeout

from accel_train.checkpoint.directory import list_updates
from accel_train.config.compatibility import settings_of_run
from accel_train.config.options import parse
from accel_train.config.schema import Config
from accel_train.errors import UserError, nearest, reason_of
from accel_train.files import atomic_write, is_count, is_number, read_json_lines, read_json_object
from accel_train.ownership.owner import has_owner, read_result
from accel_train.records import events
from accel_train.records.events import Event

FILE = "trackers.json"
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


def point_of(line: Mapping[str, Any]) -> Point | None:
    """The point of a line of metrics.jsonl; None if the line has no curves."""
    if line.get("kind") not in ("train", "eval") or not is_count(line.get("update")):
        return None
    # JSON keeps NaN as null, which is no number.
    numbers = {name: value for name, value in line.items() if type(value) in (int, float) and name not in OF_THE_LINE}
    if line["kind"] == "train":
        values = {NAMES.get(name, f"train/{name}"): value for name, value in numbers.items()}
    else:
        split = "train_epoch" if line.get("split") == "train" else line.get("split")
        weights = "_ema" if line.get("weights") == "ema" else ""
        values = {f"{split}{weights}/{name}": value for name, value in numbers.items()}
    epoch, time = line.get("epoch", 0), line.get("time", 0.0)
    return Point(line["update"], epoch if is_count(epoch) else 0, float(time) if is_number(time) else 0.0, values)


class Service:
    """A tracker that gets each step once. What it gets is written down before: a kill in between loses a step."""

    def __init__(self, name: str, config: Config, run: Path) -> None:
        self.name, self.run = name, run.resolve()
        self.project = config.recipe or "accel-train"
        self.settings = {**settings_of_run(config), "recipe": config.recipe}
        self.memory: dict[str, Any] = self._read().get(name, {})
        self.id = self.memory["id"] if isinstance(self.memory.get("id"), str) else None
        self.last = self.memory["sent"] if is_count(self.memory.get("sent")) else -1  # the newest step that it has
        self.tracker: Any = None  # Accelerate's, once it has begun

    def _read(self) -> dict[str, dict[str, Any]]:
        return {name: kept for name, kept in read_json_object(self.run / FILE).items() if isinstance(kept, dict)}

    def keep(self, **values: Any) -> None:
        """Keep these values in trackers.json, too."""
        self.memory |= values
        text = json.dumps(self._read() | {self.name: self.memory}, indent=2) + "\n"
        atomic_write(self.run / FILE, text, durable=False)

    def forget(self) -> None:
        """Forget the run that was in the directory before this one."""
        self.memory, self.id, self.last = {}, None, -1
        self.keep()

    def begin(self) -> None:
        """Start the tracker."""
        raise NotImplementedError

    def _start(self, *arguments: Any, **options: Any) -> Any:
        """Start Accelerate's tracker; return the object of the package, such as W&B's run."""
        self.tracker = LOGGER_TYPE_TO_CLASS[self.name](*arguments, **options)
        self.tracker.start()
        return self.tracker.tracker

    def send(self, points: Sequence[Point]) -> None:
        """Log those of the final points that are new."""
        for point in points:
            if point.step > self.last:
                self.last = point.step
                self.keep(sent=point.step)
                self._log(point)

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values, step=point.step)

    def close(self) -> None:
        self.tracker.finish()


class TensorBoard(Service):
    """Files in RUN/tensorboard, which anybody may read at any time. Each start writes a new one, which replaces the
    steps of older ones from a given one on."""

    def begin(self) -> None:
        self._start("tensorboard", self.run, purge_step=self.last + 1)
        kinds = (bool, int, float, str)
        settings = self.settings.items()
        self.tracker.store_init_configuration({k: v if isinstance(v, kinds) else str(v) for k, v in settings})

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values, step=point.step, walltime=point.time)


class WandB(Service):
    """One run at Weights & Biases, whose id is chosen here. Its server knows the last step; without it, "sent" does."""

    def begin(self) -> None:
        if self.id is None:
            self.id = uuid.uuid4().hex[:16]
            self.keep(id=self.id)  # before the start: a kill in between leaves one run
        if threading.current_thread() is not threading.main_thread():
            self._check_key()
        run = self._start(
            os.environ.get("WANDB_PROJECT", self.project),
            id=self.id,
            resume="allow",
            name=os.environ.get("WANDB_NAME", self.run.name),
            dir=os.environ.get("WANDB_DIR", str(self.run)),
        )
        if not run.offline:
            self.last = run.starting_step - 1
        self.tracker.store_init_configuration(self.settings)

    def _check_key(self) -> None:
        """Raise PermissionError if wandb.init would ask for a key: the terminal shows the training meanwhile."""
        import wandb

        asks = sys.stdin.isatty() and sys.stderr.isatty() and wandb.setup().settings.mode == "online"
        if asks and "prompt" in signature(wandb.login).parameters and not wandb.login(prompt=False, verify=False):
            raise PermissionError("there is no API key; use `wandb login`, or WANDB_MODE=offline")

    def _log(self, point: Point) -> None:
        self.tracker.log(point.values | {"_timestamp": point.time}, step=point.step)


class MLflow(Service):
    """One run of MLflow, whose id the server chooses."""

    def begin(self) -> None:
        run = self._start(self.project, run_id=self.id, run_name=self.run.name)
        if self.id is None:
            self.keep(id=run.info.run_id)
            self.tracker.store_init_configuration(self.settings)  # they cannot be changed

    def _log(self, point: Point) -> None:
        import mlflow  # not through the tracker: that of older versions of Accelerate takes no time

        mlflow.log_metrics(point.values, step=point.step, timestamp=int(point.time * 1000))


SERVICES: dict[str, type[Service]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_trackers(names: Sequence[str], option: str = "--trackers") -> None:
    """Raise UserError for an unknown tracker, or one without its package, which Accelerate would silently skip."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in SERVICES:
            known = ", ".join(SERVICES)
            raise UserError(f"{option}: unknown tracker {name!r}.{nearest(name, SERVICES)} Known are {known}.")
        if name not in available:
            raise UserError(f"{option}: the package of {name!r} is not installed (pip install {name}).")


def send_final(run: Path, service: Service) -> tuple[int, int]:
    """Send what is final and new; return how many steps are final, and how many are not yet."""
    # The checkpoints and the result first: what they make final is in the lines that are read after them.
    is_finished, updates = bool(read_result(run)), list_updates(run / "checkpoints")
    points: dict[int, Point] = {}
    saved = (updates[-1] if updates else 0, 0)  # the newest checkpoint's update, and the epoch that goes on after it
    for line in read_json_lines(run / "metrics.jsonl"):
        if (point := point_of(line)) is not None:
            others = points[point.step].values if point.step in points else {}
            points[point.step] = replace(point, values=others | point.values)
        elif line.get("kind") == "checkpoint" and line.get("update") == saved[0] and is_count(line.get("epoch")):
            saved = (saved[0], line["epoch"])
    # A run that resumes from the checkpoint keeps these, and all their lines are written.
    final = [points[step] for step in sorted(points) if is_finished or (step, points[step].epoch) < saved]
    service.send(final)
    return len(final), len(points) - len(final)


PAUSE_SECONDS = 5.0  # between two looks at metrics.jsonl: checkpoints may come fast, and the file may be long
END_SECONDS = 60.0  # how long a finished run waits for its trackers
STOP_SECONDS = 15.0  # how long a stopped one does: its job may be killed soon


class Trackers:
    """The trackers of a run, on its main process. A thread sends, because a server may be slow or unreachable."""

    def __init__(self, config: Config, run: Path) -> None:
        self.run = run
        self._services = [SERVICES[name](name, config, run) for name in dict.fromkeys(config.trackers)]
        self._failures: dict[str, Exception] = {}  # those that were not yet warned of
        self._asked, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def handle(self, event: Event) -> Sequence[str]:
        """Send what an event has made final; return warnings. Only the last two wait."""
        match event:
            case events.UpdateDone():
                return self.warnings()
            case events.Started():
                self.begin(resumed=event.resumed)
            case events.SaveCommitted():
                self._asked.set()
            case events.Ended() if event.result is not None:
                return self.end(END_SECONDS)
            case events.Closed():
                return self.end(STOP_SECONDS)
        return ()

    def begin(self, *, resumed: bool) -> None:
        self._thread = threading.Thread(target=self._work, args=(resumed,), name="trackers", daemon=True)
        self._asked.set()
        self._thread.start()

    def _work(self, resumed: bool) -> None:
        """In the thread: send what is final whenever somebody asks, and once more at the end."""
        while self._services:
            self._asked.wait()
            self._asked.clear()
            is_ending = self._ending.is_set()
            for service in self._services.copy():
                try:
                    if service.tracker is None:
                        if not resumed:
                            service.forget()
                        service.begin()
                    send_final(self.run, service)
                    if is_ending:
                        service.close()
                        self._services.remove(service)
                except Exception as error:  # of the tracker's package, too
                    self._services.remove(service)
                    self._failures[service.name] = error
            self._ending.wait(PAUSE_SECONDS)

    def warnings(self) -> list[str]:
        """A warning for each tracker that has failed since the last call."""
        return [
            f"the tracker {name} has failed: {reason_of(self._failures.pop(name))}. The training goes on without it; "
            f"{self._later(name)} sends its curves later."
            for name in list(self._failures)
        ]

    def end(self, seconds: float) -> list[str]:
        """Let the thread send what is final, and end it within this time. Returns warnings."""
        if self._thread is None:
            return []
        self._ending.set()
        self._asked.set()
        self._thread.join(seconds)
        self._thread = None
        late = [
            f"the tracker {service.name} is still sending; the run ends without waiting for it. "
            f"{self._later(service.name)} sends the rest."
            for service in self._services
        ]
        return [*self.warnings(), *late]

    def _later(self, name: str) -> str:
        return f"`accel-train track {shlex.quote(str(self.run))} --to {name}`"


def track(run: Path, name: str) -> str:
    """Send what is new of the run in the folder `run` to the tracker `name`. Returns how much that was, in words.

    Raises UserError if the run, while it trains, sends to this tracker itself, or if the tracker fails.
    """
    config = parse([str(run / "config.yaml")], checks_code=False)
    check_trackers([name], "--to")
    if name in config.trackers and has_owner(run):
        raise UserError(f"{run} is training, and sends its curves to {name} itself.")
    PartialState(cpu=True)  # Accelerate's trackers ask it which process they are on
    try:
        with FileLock(run / ".trackers.lock", timeout=0):
            service = SERVICES[name](name, config, run)
            service.begin()
            final, rest = send_final(run, service)
            service.close()
    except Timeout:
        raise UserError(f"Another process is sending the curves of {run}; try again later.") from None
    except Exception as error:  # of the tracker's package, too
        raise UserError(f"{name}: {reason_of(error)}. Start it again to send the rest.", code=1) from error
    waits = f"; {rest} newer steps can be sent after the next checkpoint" if rest else ""
    return f"{name}: sent the curves of {run}, {final} steps{waits}"
