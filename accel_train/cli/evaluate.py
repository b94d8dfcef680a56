"""`accel-train evaluate`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.cli.common import importing, wrong_endings
from accel_train.config.declaration import RUN
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, print_line
from accel_train.launch.environment import prepare_environment

SIZES = ("model.eval-image-size", "augment.resize", "augment.crop-fraction")
"""Options of a training that evaluate and predict take, too."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(CommandOptions):
    """Evaluate a run's model over every sample of a split, each exactly once, with the run's own configuration.

    --data.KEY VALUE changes the data of the run: another folder, or a limit; --model.eval-image-size,
    --augment.resize and --augment.crop-fraction change the size of the images. With several processes: accelerate
    launch … -m accel_train evaluate RUN. All figures, also per class, are written to RUN/evaluation-SPLIT.json, which
    the next evaluation overwrites, and to a new file in RUN/evaluations.
    """

    TRAIN_OPTIONS = ("data.", *SIZES)

    run: Annotated[Path, RUN]
    """Folder of the run."""
    split: Literal["test", "val", "train"] = "test"
    """Split to evaluate; the training samples are not augmented."""
    predictions: Path | None = None
    """Write the label and the logits of each sample to this .npz file, of the EMA if the run has one."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run) + wrong_endings([".npz"], predictions=self.predictions)


def evaluate(arguments: Sequence[str]) -> int:
    """Run `accel-train evaluate`; return the exit code."""
    if "--model.image-size" in {word.partition("=")[0].replace("_", "-") for word in arguments}:
        raise UserError("--model.image-size: is that of the run's training; give --model.eval-image-size.")
    options, overrides = parse_command(Evaluate, arguments)

    launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
    with importing(str(options.run)):
        from accel_train.cli.evaluation_tables import print_classes, print_figures
        from accel_train.launch.agreement import end_world
        from accel_train.tools.evaluate_run import evaluate_run

    result = evaluate_run(
        launch,
        options.run,
        split=options.split,
        checkpoint=options.checkpoint,
        overrides=overrides,
        trust_code=options.trust_code,
        keep_predictions=options.predictions is not None,
    )
    figures, predictions = result.file(options.run), options.predictions
    failures = result.keep(options.run, predictions) if launch.rank == 0 else []
    end_world()
    if launch.rank != 0:
        return 0
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `evaluate … | head` ends quietly; nothing is left to be written
    print_figures(result)
    print_classes(result)
    print_line("")
    if predictions is not None and predictions not in failures:
        print_line(f"the logits of {result.last['weights']}: {predictions}")
    if figures not in failures:
        print_line(f"all classes{'' if result.multi_label else ' and the confusion counts'}: {figures}")
    return 1 if failures else 0
