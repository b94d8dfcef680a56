"""What each tracker needs to go on with a run after a restart, so that no step is there twice."""

from __future__ import annotations

import json
import os
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from accel_train.config.compatibility import settings_of_run
from accel_train.config.schema import Config
from accel_train.files import atomic_write
from accel_train.records.trackers.curves import Point, numbers_in
from accel_train.untrusted import read_json_object

FILE = "trackers.json"
REPORT = "report.html"
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
    """A tracker that never gets a step twice, and only final ones. This class is for those that cannot continue a run.

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
        self._start()
        self.tracker.store_init_configuration(self.settings)

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
        """Log the figures of result.json, of the time `when`, and the report if there is one. They may be there."""
        if self.memory.values.get("result") != result["updates"]:
            self.memory.keep(result=result["updates"])
            self._log(_point_of(result, when))

    def close(self) -> None:
        self.tracker.finish()


def _point_of(result: Mapping[str, Any], when: float) -> Point:
    values = {f"result/{name}": value for name, value in numbers_in(result).items()}
    return Point(result["updates"], 0, when, values)


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
        run = self.tracker.tracker
        run.summary.update(numbers_in(result))
        if (self.run / REPORT).is_file():
            import wandb

            page = wandb.Artifact(f"report-{self.memory.id}", type="report")
            page.add_file(str(self.run / REPORT))
            run.log_artifact(page)  # the same content makes no new version


class MLflow(Service):
    """One run of MLflow, whose id the server chooses. Its server is asked which step each curve has reached."""

    def begin(self) -> None:
        from mlflow import MlflowClient

        client, id = MlflowClient(), self.memory.id
        known = None if id is None else self._find(id)
        self._start(run_id=None if known is None else id, run_name=self.run.name)
        id = self.tracker.tracker.info.run_id
        self.memory.keep(id=id)
        data = client.get_run(id).data
        if not data.params:  # they cannot be changed
            self.tracker.store_init_configuration(self.settings)
        self.steps = {key: max(value.step for value in client.get_metric_history(id, key)) for key in data.metrics}

    def _find(self, id: str) -> Any:
        """The run of this id; None if it was deleted, or is on another server than the one of this start."""
        from mlflow import MlflowClient, MlflowException

        try:
            run = MlflowClient().get_run(id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._log(point)
        if points:
            self.memory.keep(sent=max(self.memory.sent, points[-1].step))

    def _log(self, point: Point) -> None:
        new = {key: value for key, value in point.values.items() if point.step > self.steps.get(key, NOTHING)}
        if new:
            import mlflow  # not through the tracker: that of older versions of Accelerate takes no time

            mlflow.log_metrics(new, step=point.step, timestamp=int(point.time * 1000))
            self.steps |= dict.fromkeys(new, point.step)

    def finish(self, result: Mapping[str, Any], when: float) -> None:
        self._log(_point_of(result, when))
        if (self.run / REPORT).is_file():
            import mlflow

            mlflow.log_artifact(str(self.run / REPORT))


SERVICES = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def create_service(name: str, config: Config, run: Path) -> Service:
    """The tracker of this name, not yet started."""
    return SERVICES.get(name, Service)(name, config, run)
