"""`accel-train predict RUN IMAGE … --page FILE.html`: images with their most probable classes, to look at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from accel_train.analysis.inference.predict import Prediction
from accel_train.analysis.loaded_run import LoadedRun
from accel_train.config.declaration import Tta
from accel_train.errors import UserError, counted, writing
from accel_train.files import atomic_write
from accel_train.report.shared.images import image_uri
from accel_train.report.shared.render import render

SHOWN = 500
"""Images on the page: a browser shows so many at once. A file of --output has all."""
SIDE = 224
"""Pixels: larger inputs of a model are made smaller for the page."""


@dataclass(frozen=True)
class Picture:
    """An image with its most probable classes."""

    path: str
    name: str
    """The path below the folder that all images are in."""
    uri: str
    """The image as a data: URI; "": it cannot be read."""
    error: str
    answers: list[tuple[str, float, str, str]]
    """(class, probability, its text, the text of the calibrated one or "") of each, the most probable one first."""


def keeping_page(
    predictions: Iterable[Prediction],
    run: LoadedRun,
    path: Path,
    *,
    max_pixels: int | None = None,
    tta: Tta = "none",
) -> Iterator[Prediction]:
    """Yield the same predictions; after the last one the page `path` is there, with the first SHOWN of them.

    `run`, `max_pixels`, `tta`: as the images were classified. Raises UserError if the page cannot be written.
    """
    shown, count, unreadable = list[tuple[Prediction, str]](), 0, 0
    for prediction in predictions:
        count += 1
        unreadable += bool(prediction.error)
        if len(shown) < SHOWN:
            shown.append((prediction, "" if prediction.error else _uri(run, prediction.image, max_pixels)))
        yield prediction
    calibration = run.calibration_with(tta)
    notes = []
    if count > SHOWN:
        notes.append(f"The first {SHOWN:,} of {counted(count, 'image')}; `accel-train predict … --output` has all.")
    if unreadable:
        notes.append(f"{unreadable:,} of {counted(count, 'image')} cannot be read.")
    probabilities = calibration.text.removeprefix("probabilities are ")
    facts = [("model", run.title), ("images", f"{count:,}"), ("probabilities", probabilities)]
    page = render(
        "report/predictions/predictions.html",
        title=f"{run.path.resolve().name}: what the model answers",
        facts=facts + [("test-time augmentation", tta)] * (tta != "none"),
        notes=notes,
        calibrated=calibration.temperature is not None,
        pictures=_pictures(shown),
    )
    with writing("--page", path):
        atomic_write(path, page)


def _uri(run: LoadedRun, image: Path, max_pixels: int | None) -> str:
    """The image as the model sees it, at most SIDE pixels wide and high; "" if it has been removed since."""
    try:
        inputs = run.transform(image, max_pixels=max_pixels).cpu()
    except UserError:
        return ""
    if inputs.shape[-1] > SIDE:
        inputs = torch.nn.functional.interpolate(inputs[None], (SIDE, SIDE), mode="bilinear", antialias=True)[0]
    return image_uri(inputs, run.info)


def _pictures(shown: Sequence[tuple[Prediction, str]]) -> list[Picture]:
    """What the template shows of each prediction and its data: URI."""
    paths = [prediction.image.absolute() for prediction, _ in shown]
    folder = os.path.commonpath([path.parent for path in paths]) if paths else ""
    pictures = []
    for (prediction, uri), path in zip(shown, paths, strict=True):
        calibrated = [f"{value:.1%}" for value in prediction.calibrated] or [""] * len(prediction.classes)
        values = prediction.probabilities
        texts = [f"{value:.1%}" for value in values]
        answers = list(zip(prediction.classes, values, texts, calibrated, strict=True))
        name = os.path.relpath(path, folder)
        pictures.append(Picture(str(prediction.image), name, uri, prediction.error, answers))
    return pictures
