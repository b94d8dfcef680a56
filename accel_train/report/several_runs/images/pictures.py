"""The images on which two runs differ: only one of them has them right."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.load_run import data_of_run
from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, first_of
from accel_train.report.several_runs.compared import Compared
from accel_train.report.several_runs.images.answers import Answers
from accel_train.report.shared.images import input_uri

SHOWN = 8
"""Of each direction."""
Draw = Callable[[int], tuple[str, str]]
"""From an image's number to its name and its data: URI. Raises UserError if it cannot be read."""


@dataclass(frozen=True)
class Picture:
    """An image, and what the two runs said of it."""

    name: str
    uri: str
    right: str
    """What the run that is right said, with its probability."""
    wrong: str
    """What the other one said, with its probability."""


@dataclass(frozen=True)
class OneSided:
    """The images that only one of two runs has right."""

    right: str
    wrong: str
    """Names of the runs."""
    ids: Sequence[int]
    """Of all these images: first those for which the probabilities of the truth differ most."""
    pictures: list[Picture] = field(default_factory=list)


def disagreement(first: Compared, second: Compared, *, trust_code: bool) -> tuple[list[OneSided], str]:
    """The images that only one of two runs has right, both ways, with pictures of SHOWN of each, of which the two are
    most sure, as the first run saw them; and why there are none, or "". Both have answers for the same images."""
    a, b = first.answers, second.answers
    assert a is not None and b is not None
    sides = [OneSided(second.name, first.name, _most_sure(b, a)), OneSided(first.name, second.name, _most_sure(a, b))]
    note = ""
    if any(side.ids for side in sides):
        try:
            draw = _drawing(first, a, trust_code=trust_code)
            for side, answers in zip(sides, ((b, a), (a, b)), strict=True):
                side.pictures.extend(itertools.islice(_pictures(side.ids, *answers, draw), SHOWN))
        except UserError as error:
            note = f"The pictures are left out: {error}"
    return sides, note


def _drawing(run: Compared, answers: Answers, *, trust_code: bool) -> Draw:
    """Raises UserError if the data cannot be loaded or has changed."""
    config, splits = data_of_run(run.run.path, trust_code=trust_code)
    found = {"test": splits.test, "val": splits.validation}.get(answers.split)
    if found is None or not np.array_equal(found.labels.numpy(), answers.labels):
        raise UserError("the data has changed since the evaluation.")
    source: Source = found
    preprocessing = Preprocessing(run.run.info, config.augment)
    return lambda id: (source.name(id), input_uri(source, id, preprocessing, run.run.info))


def _pictures(ids: Sequence[int], a: Answers, b: Answers, draw: Draw) -> Iterator[Picture]:
    """The images `ids`, which `a` has right, without those that cannot be read."""
    for id in ids:
        with contextlib.suppress(UserError):
            name, uri = draw(id)
            yield Picture(name, uri, _said(a, id), _said(b, id))


def _most_sure(a: Answers, b: Answers) -> Sequence[int]:
    """The images that only `a` has right; those for which the probabilities of the truth differ most, first."""
    ids = np.flatnonzero(a.right & ~b.right)
    sure = a.chance_true[ids].astype(np.float64) - b.chance_true[ids]
    order: list[int] = ids[np.argsort(-sure, kind="stable")].tolist()
    return order


def _said(answers: Answers, id: int) -> str:
    said, names = answers.said[id], answers.classes
    if answers.multi_label:
        return first_of([names[number] for number in np.flatnonzero(said).tolist()], 4) or "none"
    return f"{names[said]} ({answers.chance_said[id]:.0%})"
