"""Which classes two models confuse differently."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from accel_train.report.several_runs.images.answers import Answers

HEAT_MAP = 25  # classes at most; of more, the pairs that changed most are listed
PAIRS = 20


@dataclass(frozen=True)
class ConfusionChange:
    """The second model's confusion counts minus the first's."""

    classes: tuple[str, ...]
    heat: list[list[tuple[int, float, bool]]] = field(default_factory=list)
    """[true class][predicted class]: the change, its strength from 0 to 1, and whether it is for the better."""
    pairs: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(true class, predicted class, images by the first, by the second) of the pairs that changed most."""


def confusion_change(first: Answers, second: Answers) -> ConfusionChange | None:
    """How the confusion of two models on the same images differs: of few classes a heat map, of more the pairs that
    changed most. None if it does not differ, or if an image has several labels."""
    if first.multi_label or np.array_equal(first.said, second.said):
        return None
    classes, size = first.classes, len(first.classes)
    counts = [np.unique(each.labels * size + each.said, return_counts=True) for each in (first, second)]
    by_first, by_second = (dict(zip(codes.tolist(), number.tolist(), strict=True)) for codes, number in counts)
    changes = {
        code: by_second.get(code, 0) - by_first.get(code, 0) for code in sorted(by_first.keys() | by_second.keys())
    }
    largest = max(map(abs, changes.values()))
    if not largest:
        return None
    if size <= HEAT_MAP:
        heat = [
            [
                (change, abs(change) / largest, (change > 0) == (true == said))
                for said in range(size)
                for change in (changes.get(true * size + said, 0),)
            ]
            for true in range(size)
        ]
        return ConfusionChange(classes, heat)
    wrong = [code for code, change in changes.items() if change and code // size != code % size]
    chosen = sorted(wrong, key=lambda code: (-abs(changes[code]), code))[:PAIRS]
    pairs = [
        (classes[code // size], classes[code % size], by_first.get(code, 0), by_second.get(code, 0)) for code in chosen
    ]
    return ConfusionChange(classes, [], pairs)
