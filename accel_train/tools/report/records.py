"""What a run has written, read for its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from accel_train.config.compatibility import flatten, settings_of_run
from accel_train.config.options import parse
from accel_train.config.recipe import recipe_names
from accel_train.config.schema import Config, as_dict
from accel_train.errors import UserError, raise_mistakes
from accel_train.files import read_json_lines, read_json_object
from accel_train.ownership.owner import has_owner, read_result
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.task import Metric

Row = dict[str, Any]
SPLITS = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class RunRecords:
    """The files of one run. Missing ones are empty: a run that was stopped has no result."""

    path: Path
    config: Config
    info: ModelInfo
    result: Row
    status: Row
    environment: Row
    lines: list[Row]
    """Of metrics.jsonl, without damaged ones."""
    data: Row = field(default_factory=dict)
    """Of data.json; {} without one."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def metrics(self) -> list[Metric]:
        """All metrics that an evaluation of the run may have."""
        return self.info.task.evaluation_metrics(self.config.metrics)

    @property
    def devices(self) -> str:
        """Such as "2 x NVIDIA A100-SXM4-80GB"; "" if they are not known."""
        found = self.environment.get("devices")
        names = [*map(str, found)] if isinstance(found, list) else []
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

    def of_kind(self, kind: str) -> list[Row]:
        """The lines of a kind: "train", "eval", "checkpoint" or "event"."""
        return [line for line in self.lines if line.get("kind") == kind]

    def evaluations(self, split: str, weights: str) -> list[Row]:
        """The eval lines of a split ("train": of training's own samples) and of "model" or "ema"."""
        found = self.of_kind("eval")
        return [line for line in found if (line.get("split"), line.get("weights")) == (split, weights)]

    def newest_evaluation(self, weights: str) -> tuple[str, Row]:
        """ "test", or else "val", and the newest eval line of this split and of "model" or "ema"; "" and {} if there is
        none."""
        for split in ("test", "val"):
            if rows := self.evaluations(split, weights):
                return split, rows[-1]
        return "", {}

    @cached_property
    def updates_per_epoch(self) -> float:
        """Updates of an epoch, from the first epoch that is complete; else from the status."""
        for line in self.evaluations("train", "model"):
            if line["epoch"] > self.config.epochs:  # a part of an epoch
                break
            return float(line["update"] / line["epoch"]) or 1.0
        total = self.status.get("updates")
        return total / self.config.epochs if total else 1.0

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by their names on the command line, without those of a single start."""
        return settings_of_run(self.config)


def read_run(path: Path) -> RunRecords:
    """Read the files of the run in the folder `path`. None of its code is run. Raises UserError."""
    config = parse([str(path / "config.yaml")], checks_code=False)
    try:
        lines = [*read_json_lines(path / "metrics.jsonl")]
    except OSError as error:
        raise UserError(f"{path / 'metrics.jsonl'} cannot be read: {error.strerror}.") from error
    status = read_json_object(path / "status.json")
    if status.get("state") == "training" and not has_owner(path):
        status["state"] = "stale"  # as `accel-train runs` calls it
    return RunRecords(
        path,
        config,
        read_model_info(path),
        read_result(path),
        status,
        read_json_object(path / "environment.json"),
        lines,
        read_json_object(path / "data.json"),
    )


def state_of(run: RunRecords) -> str:
    """How the run ended, or where it is."""
    state = str(run.status.get("state", "unknown"))
    if run.result:
        by = run.result.get("stopped_by", "epochs")
        return "finished" + (f", stopped by {by}" if by != "epochs" else "")
    at = f"epoch {run.status.get('epoch', '?')} of {run.config.epochs}, update {run.status.get('update', '?')}"
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{state} at {at}{reason}"


def differences_from_recipe(run: RunRecords) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """What the run is compared with, and the settings that differ: key -> (there, in the run)."""
    name = run.config.recipe
    if name in recipe_names():
        base, title = parse([name]), f"the recipe {name}"
    else:
        base, title = Config(), "the defaults"
    there = flatten(as_dict(base))
    return title, {key: (there.get(key), value) for key, value in run.settings.items() if there.get(key) != value}


def check_runs(paths: Iterable[Path]) -> list[RunRecords]:
    """Read all runs. Raises one UserError with all that cannot be read."""
    runs: list[RunRecords] = []
    mistakes: list[str] = []
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            mistakes += error.messages
    raise_mistakes(mistakes)
    return runs
