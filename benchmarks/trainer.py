"""Start `accel-train train` as a contestant, and choose the options of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import turns

from accel_train.config.options import parse
from accel_train.data.sources.arrays import PUBLISHED
from accel_train.models import input_size


def data_words(recipe: str, root: Path | None) -> list[str]:
    """Return the options for the data in the folder `root`; None: for synthetic images of the same shapes."""
    if root:
        return ["--data.root", str(root)]
    config = parse([recipe])
    if config.data.name == "digits":
        return []
    words: list[object] = ["--data.name", "synthetic"]
    if published := PUBLISHED.get(config.data.name):
        size = input_size(config.model, published.size)
        words += ["--data.channels", len(published.mean), "--data.train-limit", published.train_images]
        words += ["--model.image-size", size]
    return [str(word) for word in words]


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
    """Start a run of `recipe` in `folder` that logs at the end of each turn and does not evaluate.

    Evaluations are not part of the speed. `launcher` comes before the command, `words` after it.
    """
    run, many = folder / "run", 10_000
    line = [*launcher, "-m", "accel_train", "train", recipe, "--output-dir", run, "--batch-size", batch_size]
    line += ["--epochs", many, "--log-every-updates", updates, "--eval-every-epochs", many]
    line += [*data_words(recipe, root), *words]
    return turns.Contestant(line, folder / "log", updates=updates, images=batch_size, progress=run / "metrics.jsonl")
