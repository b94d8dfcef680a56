"""accel_train's own part in a contest: `accel-train train`, and the options that give a recipe its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import turns

from accel_train.bench.bench import with_synthetic_data
from accel_train.config.options import parse


def data_words(recipe: str, root: Path | None) -> list[str]:
    """Options that give `recipe` the data in the folder `root`; None: synthetic images of the same shapes."""
    if root:
        return ["--data.root", str(root)]
    data = with_synthetic_data(parse([recipe])).data
    given = {"name": data.name, "image-size": data.image_size, "channels": data.channels}
    given |= {"classes": data.classes, "train-images": data.train_images}
    return [str(word) for key, value in given.items() for word in (f"--data.{key}", value)]


def trainer(
    recipe: str,
    root: Path | None,
    folder: Path,
    *,
    batch_size: int,
    updates: int,
    launcher: Sequence[object] = (),
    words: Sequence[object] = (),
) -> turns.Contestant:
    """A run of `recipe` in `folder`, but that it logs at the end of each turn, and evaluates at none.

    Evaluations are no part of a speed. `launcher` and `words` come before and after.
    """
    run, many = folder / "run", 10_000
    line = [*launcher, "-m", "accel_train", "train", recipe, "--output-dir", run, "--batch-size", batch_size]
    line += ["--epochs", many, "--log-every-updates", updates, "--eval-every-epochs", many]
    line += [*data_words(recipe, root), *words]
    return turns.Contestant(line, folder / "log", updates=updates, images=batch_size, progress=run / "metrics.jsonl")
