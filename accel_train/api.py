"""The trainer from Python, as in a notebook.

    from accel_train.api import load_run, train

    directory = train({"base": "digits", "epochs": 3})     # the options of a recipe, in a dict
    run = load_run(directory)
    logits = run.model(run.transform(image)[None])         # of the classes run.classes
    rows = run.rows("eval")                                # for pandas.DataFrame(rows)

Mistakes raise `accel_train.errors.UserError`. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_train.config.options import parse, parse_settings
from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment

if TYPE_CHECKING:
    from accel_train.analysis.loaded_run import LoadedRun
    from accel_train.analysis.predict import Prediction

__all__ = ["evaluate", "load_run", "predict", "train"]


def train(recipe: str | Path | Mapping[str, Any], *options: str) -> Path:
    """Train, or continue the run in its output directory; return the run's directory.

    `recipe`: a recipe's name or file, or its content as a dict, such as {"base": "digits", "optim": {"lr": 0.1}}; files
    in a dict are relative to the working folder. `options`: as on the command line, such as "--epochs", "3".

    With accelerate's `notebook_launcher(train, (recipe, "--output-dir", "runs/mine"), num_processes=2)` it trains on
    several processes; then the output directory must be given, and nothing may have created an Accelerator before. An
    interrupted training (the notebook's stop button) saves a checkpoint and returns; the same call continues it.

    Raises UnsavedError, a UserError, if the training ended but its checkpoint, weights or result could not be written:
    what is returned has them. A failed save in between is a warning.
    """
    config = parse_settings(recipe, options) if isinstance(recipe, Mapping) else parse([str(recipe), *options])
    launch = prepare_environment(bitwise=config.bitwise)
    if config.output_dir is None:
        if launch.world_size > 1:
            raise UserError("several processes need a common --output-dir; none was given.")
        from accel_train.ownership.folders import new_directory

        config = dataclasses.replace(config, output_dir=new_directory(config.recipe)[0])
    assert config.output_dir is not None
    from accel_train.train import train as train_config

    train_config(config, launch)
    return config.output_dir


def load_run(run: str | Path, *, checkpoint: str | Path | None = None, trust_code: bool = False) -> LoadedRun:
    """Return a run's model with its transform, class names and figures.

    `checkpoint`: a checkpoint's folder or name, such as "update-00001234"; default: the final weights, else the newest
    checkpoint. `trust_code`: run the model's code that the run keeps, although it may be somebody else's.
    """
    from accel_train.analysis.loaded_run import load

    return load(Path(run), None if checkpoint is None else Path(checkpoint), trust_code=trust_code)


def evaluate(
    run: str | Path,
    *options: str,
    split: str = "test",
    checkpoint: str | Path | None = None,
    trust_code: bool = False,
) -> dict[str, Any]:
    """Evaluate a run's model on every sample of a split, and return the figures, as RUN/evaluation-SPLIT.json has them.

    If that file cannot be written, there is a warning, and the figures are returned all the same. `options`: other
    data, as on the command line: "--data.root", "elsewhere".
    """
    run = Path(run)
    launch = prepare_environment()
    from accel_train.analysis.evaluate_run import evaluate_run

    path = None if checkpoint is None else Path(checkpoint)
    return evaluate_run(launch, run, split=split, checkpoint=path, overrides=options, trust_code=trust_code).record


def predict(
    run: str | Path | LoadedRun,
    images: Iterable[str | Path],
    *,
    top_k: int | None = None,
    threshold: float | None = None,
    trust_code: bool = False,
) -> list[Prediction]:
    """Return the most probable classes of image files, the most probable one first, in the order of `images`.

    `top_k`: how many; default: 5, or if an image may have several labels, all with a probability of at least
    `threshold` (default: 0.5), which only such runs take.

    The prediction of a file that cannot be read has no classes, but an `error`.
    """
    loaded = load_run(run, trust_code=trust_code) if isinstance(run, (str, Path)) else run
    return loaded.predict([Path(image) for image in images], top_k=top_k, threshold=threshold)
