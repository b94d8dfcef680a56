"""What the records of observed.py say: which updates are in the final weights, and which were lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step of the optimizer, of all processes together."""

    images: tuple[int, ...]
    loss: float
    """The mean over these images."""
    after: str
    """The fingerprint of the weights after it."""
    epoch: int | None = None


@dataclass(frozen=True)
class Start:
    """One start of a program: the fingerprint of the weights with which it began ("" without a step), and its steps."""

    before: str
    steps: tuple[Step, ...]


def read_start(folder: Path) -> Start:
    """Read the records of all processes. A step counts when rank 0 has done it."""
    ranks = [_lines(path) for path in sorted(folder.glob("rank*.jsonl"))]
    before = next((line["before"] for rank in ranks for line in rank if "before" in line), "")
    after = {line["done"]: line["after"] for rank in ranks for line in rank if "done" in line}
    shares: dict[int, list[dict[str, Any]]] = {number: [] for number in after}
    for line in (line for rank in ranks for line in rank if line.get("step") in after):
        shares[line["step"]].append(line)
    steps = []
    for number, parts in sorted(shares.items()):
        images = tuple(image for part in parts for image in part["images"])
        loss = sum(part["loss"] for part in parts) / len(images)
        steps.append(Step(images, loss, after[number], parts[0]["epoch"]))
    return Start(before, tuple(steps))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def kept_steps(starts: Sequence[Start]) -> list[Step]:
    """The steps that led to the last weights, from the first to the last.

    A start goes on from the step of an earlier start after which the weights were those with which it began; from the
    beginning if they are those of the first start. Raises ValueError if they are neither.
    """
    starts = [start for start in starts if start.steps]
    kept = list(starts[-1].steps)
    before = starts[-1].before
    earlier = starts[:-1]
    while before != starts[0].before:
        for number, start in reversed(list(enumerate(earlier))):
            ends = [place for place, step in enumerate(start.steps, 1) if step.after == before]
            if ends:
                kept = [*start.steps[: ends[-1]], *kept]
                before, earlier = start.before, earlier[:number]
                break
        else:
            raise ValueError("A start began with weights that no earlier start had.")
    return kept


def missed_and_repeated(steps: Sequence[Step], images: int, batch: int) -> tuple[int, int]:
    """How many images were left out of their epoch, and how often one was seen again in it, in all epochs together.

    `images`: in an epoch. A program that did not say which epoch a step belongs to has `images` / `batch` in each.
    """
    missed = repeated = 0
    numbered = [
        (number * batch // images if step.epoch is None else step.epoch, step) for number, step in enumerate(steps)
    ]
    for _, group in groupby(numbered, key=lambda pair: pair[0]):
        seen = Counter(image for _, step in group for image in step.images)
        missed += images - len(seen)
        repeated += sum(seen.values()) - len(seen)
    return missed, repeated
