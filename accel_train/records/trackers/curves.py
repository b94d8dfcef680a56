"""The curves of a run: which curve each value of metrics.jsonl belongs to. Each curve has one meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_train.untrusted import is_count, is_number, read_json_lines

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
