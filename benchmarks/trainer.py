"""Start `accel-train train` as a contestant, and choose the options of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import turns

from accel_train.bench.bench import with_synthetic_data
from accel_train.config.options import parse


def data_words(recipe: str, root: Path | None) -> list[str]:
    """Return the options for the data in the folder `root`; None: for synthetic images of the same shapes."""
    if root:
        return ["--data.root", str(root)]
    config = with_synthetic_data(parse([recipe]))
    given = {"data.name": config.data.name, "data.channels": config.data.channels}
    given |= {"data.train-limit": config.data.train_limit, "model.image-size": config.model.image_size}
    return [str(word) for key, value in given.items() if value is not None for word in (f"--{key}", value)]


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
