"""A run among those that are compared: its records, its answers, and its figures as numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_train.config.schema import as_dict
from accel_train.report.several_runs.images.answers import Answers, chosen_by, why_not_the_same
from accel_train.report.shared.records import Row, RunRecords


@dataclass(frozen=True)
class Compared:
    """One of the runs."""

    name: str
    """As much of its path as tells the runs apart."""
    run: RunRecords
    answers: Answers | None = None
    """None: there are no predictions of its weights."""
    evaluation: Row = field(default_factory=dict)
    """The figures of the same weights, from RUN/evaluation-SPLIT.json, and the "split"."""
    note: str = ""
    """What is to be said of it, such as why it has no answers."""

    @property
    def main(self) -> str:
        return self.run.main_figure

    @property
    def split(self) -> str:
        """The split that its figures are of."""
        return self.answers.split if self.answers else "test"

    @property
    def has_ema(self) -> bool:
        if self.answers is not None:
            return self.answers.weights.endswith("ema.safetensors")
        return any(key.startswith("ema_test_") and value is not None for key, value in self.run.result.items())

    @property
    def is_finished(self) -> bool:
        return bool(self.run.result)

    def figure(self, name: str) -> float | None:
        """A figure of the EMA if the run has one, else of the model: of the evaluation, or else of result.json."""
        if self.answers is not None and name in self.evaluation:
            return number(self.evaluation[name])
        return number(self.run.result.get(f"{'ema_' if self.has_ema else ''}test_{name}"))

    @property
    def score(self) -> float | None:
        """The main figure; None if there is none, or if it is NaN."""
        if self.answers is not None and not self.answers.multi_label:
            return None if self.answers.broken else int(self.answers.right.sum()) / len(self.answers)
        return self.figure(self.main)


def number(value: Any) -> float | None:
    """A finite number, or None: a damaged record may have anything."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def names_of(runs: Sequence[RunRecords]) -> list[str]:
    """A name for each run: its folder's, or as much of its path as tells the runs apart."""
    paths = [run.path.resolve() for run in runs]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-length:])) for path in paths]
        if len({*names}) == len(names):
            return names
    return [f"{place}: {run.name}" for place, run in enumerate(runs, 1)]


def groups_of(runs: Sequence[Compared]) -> list[list[Compared]]:
    """The runs in groups that differ in their seed alone: the settings, in the order of their first runs."""
    groups: dict[str, list[Compared]] = {}
    for each in runs:
        settings = {key: value for key, value in each.run.settings.items() if key != "seed"}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(each)
    return [*groups.values()]


def differing_settings(runs: Sequence[Compared]) -> dict[str, list[Any]]:
    """The settings that are not the same in all runs: key -> the value of each run."""
    all_settings = [each.run.settings for each in runs]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    values = {key: [settings.get(key) for settings in all_settings] for key in keys}
    return {key: each for key, each in values.items() if any(value != each[0] for value in each)}


def why_not_comparable(first: Compared, second: Compared) -> str:
    """Why the figures of two runs are not of the same task; "" if they are.

    Less is needed than for a comparison image by image: each run may have been tested on images of its own that its
    seed has drawn from the same data.
    """
    if first.run.info.multi_label != second.run.info.multi_label or first.split != second.split:
        return "they were judged by different figures or splits"
    if first.run.info.classes != second.run.info.classes:
        return "their classes differ"
    if first.answers is not None and second.answers is not None:
        drawn = "seed" in first.answers.chosen_by and "seed" in second.answers.chosen_by
        reason = why_not_the_same(first.answers, second.answers)
        settings = [first.answers.chosen_by, second.answers.chosen_by]
        if not (reason and drawn):
            return reason
    else:
        settings = [chosen_by(as_dict(each.run.config.data), each.split, 0) for each in (first, second)]
    return _difference(*settings)


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    for key in dict.fromkeys((*first, *second)):
        if key != "seed" and first.get(key) != second.get(key):
            return f"{key} decides by which images a run is judged, and differs: {first.get(key)}, {second.get(key)}"
    return ""
