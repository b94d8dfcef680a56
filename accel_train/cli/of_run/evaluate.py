"""`accel-train evaluate`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import importing, wrong_endings
from accel_train.config.declaration import Tta
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, print_line
from accel_train.launch.environment import prepare_environment

if TYPE_CHECKING:
    from accel_train.analysis.measure import EvaluationResult

SIZES = ("model.eval-image-size", "augment.resize", "augment.crop-fraction")
"""Options of a training that evaluate and predict take, too."""


@dataclass(frozen=True, kw_only=True)
class _Evaluation(CommandOptions):
    split: Literal["test", "val", "train"] = "test"
    """Split to evaluate; the training samples are not augmented."""
    predictions: Path | None = None
    """Write the label and the logits of each sample to this .npz or .parquet file, of the EMA if the run has one."""
    tta: Tta = "none"
    """Test-time augmentation, the mean of the probabilities over views of each image: flip (the image and its mirror
    image, twice the time); ten-crop (the corners, the centre and their mirror images, ten times the time)."""

    def mistakes(self) -> list[str]:
        return wrong_endings([".npz", ".parquet"], predictions=self.predictions)


@dataclass(frozen=True, kw_only=True)
class Evaluate(_Evaluation):
    """Evaluate a run's model over every sample of a split, each exactly once, with the run's own configuration.

    --data.KEY VALUE changes the data of the run: another folder, or a limit; --model.eval-image-size,
    --augment.resize and --augment.crop-fraction change the size of the images. With several processes: accelerate
    launch … -m accel_train evaluate RUN. All figures, also per class, are written to RUN/evaluation-SPLIT.json (with
    --tta flip: evaluation-SPLIT-tta-flip.json), which the next evaluation overwrites, and to a new file in
    RUN/evaluations. A published model needs no run: accel-train
    evaluate --model.name resnet50 --model.pretrained true --data.name folder --data.root DIR.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    trust_code: bool = False
    """Run the code that the run keeps of its own model and data (RUN/code), although it may be somebody else's."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run) + super().mistakes()


@dataclass(frozen=True, kw_only=True)
class EvaluatePublished(_Evaluation):
    """Evaluate a published model without a run. It must have all classes of the data, by name.

    Give --model.name NAME --model.pretrained true and --data.KEY VALUE. Images are prepared as the publisher does.
    """

    output: Path | None = None
    """Write all figures to this JSON file."""


def evaluate(arguments: Sequence[str]) -> int:
    """Run `accel-train evaluate`; return the exit code."""
    keys = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if any(key.startswith("--model.") for key in keys - {"--model.eval-image-size", "--model.image-size"}):
        return _evaluate_published(arguments)
    if "--model.image-size" in keys:
        raise UserError("--model.image-size: is that of the run's training; give --model.eval-image-size.")
    options, overrides = parse_command(
        Evaluate, arguments, "accel-train evaluate", positional=("run",), others=("data.", *SIZES)
    )

    launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
    with importing(str(options.run)):
        from accel_train.analysis.evaluate_run import evaluate_run
        from accel_train.analysis.predictions import check_can_write

    check_can_write(options.predictions)
    result = evaluate_run(
        launch,
        options.run,
        split=options.split,
        checkpoint=options.checkpoint,
        overrides=overrides,
        trust_code=options.trust_code,
        keep_predictions=options.predictions is not None,
        tta=options.tta,
    )
    figures = result.file(options.run)
    failures = result.keep(options.run, options.predictions) if launch.rank == 0 else []
    return _answer(result, launch.rank, failures, figures, options.predictions)


def _evaluate_published(arguments: Sequence[str]) -> int:
    groups = ("model.", "data.", "augment.", "eval-batch-size")
    options, overrides = parse_command(
        EvaluatePublished, arguments, "accel-train evaluate", positional=(), others=groups
    )

    launch = prepare_environment()
    with importing():
        from accel_train.analysis.predictions import check_can_write
        from accel_train.analysis.published import evaluate_published

    predictions, output = options.predictions, options.output
    check_can_write(predictions)
    keeps = predictions is not None
    result = evaluate_published(launch, overrides, split=options.split, keep_predictions=keeps, tta=options.tta)
    failures = result.write([] if output is None else [output], predictions) if launch.rank == 0 else []
    return _answer(result, launch.rank, failures, output, predictions)


def _answer(
    result: EvaluationResult, rank: int, failures: Sequence[Path], figures: Path | None, predictions: Path | None
) -> int:
    """Print the result on the main process; return the exit code. `failures`: the files that cannot be written."""
    from accel_train.cli.of_run.evaluation_tables import print_classes, print_figures
    from accel_train.launch.agreement import end_world

    end_world()
    if rank != 0:
        return 0
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `evaluate … | head` ends quietly; nothing is left to be written
    print_figures(result)
    print_classes(result)
    print_line("")
    if predictions is not None and predictions not in failures:
        print_line(f"the logits of {result.last['weights']}: {predictions}")
    if figures is not None and figures not in failures:
        print_line(f"all classes{'' if result.multi_label else ' and the confusion counts'}: {figures}")
    return 1 if failures else 0
