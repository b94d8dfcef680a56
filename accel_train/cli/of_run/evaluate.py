"""`accel-train evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import importing, not_a_run
from accel_train.config.options import CommandOptions, parse_command
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Evaluate(CommandOptions):
    """Evaluate a run's model over every sample of a split, each exactly once, with the run's own configuration.

    --data.KEY VALUE changes the data of the run: another folder, or a limit. With several processes: accelerate
    launch … -m accel_train evaluate RUN. All figures, also per class, are written to RUN/evaluation-SPLIT.json, which
    the next evaluation overwrites, and to a new file in RUN/evaluations. A published model needs no run: accel-train
    evaluate --model.name resnet50 --model.pretrained true --data.name folder --data.root DIR.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["test", "val", "train"] = "test"
    """Split to evaluate; the training samples are not augmented."""
    checkpoint: Path | None = None
    """A checkpoint of the run, such as update-00001234; default: the final model, else the newest checkpoint."""
    predictions: Path | None = None
    """Write the label and the logits of each sample to this .npz or .parquet file, of the EMA if the run has one."""
    trust_code: bool = False
    """Run the code that the run keeps of its own model and data (RUN/code), although it may be somebody else's."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run) + _wrong_suffix(self.predictions)


@dataclass(frozen=True)
class EvaluatePublished(CommandOptions):
    """Evaluate a published model without a run. It must have all classes of the data, by name.

    Give --model.name NAME --model.pretrained true and --data.KEY VALUE. Images are prepared as the publisher does.
    """

    split: Literal["test", "val", "train"] = "test"
    """Split to evaluate; the training samples are not augmented."""
    predictions: Path | None = None
    """Write the label and the logits of each sample to this .npz or .parquet file."""
    output: Path | None = None
    """Write all figures to this JSON file."""

    def mistakes(self) -> list[str]:
        return _wrong_suffix(self.predictions)


def _wrong_suffix(predictions: Path | None) -> list[str]:
    if predictions is None or predictions.suffix in (".npz", ".parquet"):
        return []
    return [f"--predictions: expected a name that ends in .npz or .parquet, found '{predictions}'."]


def evaluate(arguments: Sequence[str]) -> int:
    """Run `accel-train evaluate`; return the exit code."""
    prog = "accel-train evaluate"
    if any(word.startswith("--model.") for word in arguments):
        return _evaluate_published(arguments, prog)
    options, overrides = parse_command(Evaluate, arguments, prog, positional=("run",), others=("data.",))

    launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
    with importing(str(options.run)):
        from accel_train.analysis.evaluate_run import evaluate_run

    measured = evaluate_run(
        launch,
        options.run,
        split=options.split,
        checkpoint=options.checkpoint,
        overrides=overrides,
        trust_code=options.trust_code,
        predictions=options.predictions,
    )
    return 1 if measured.unwritten else 0


def _evaluate_published(arguments: Sequence[str], prog: str) -> int:
    groups = ("model.", "data.", "augment.", "eval-batch-size")
    options, overrides = parse_command(EvaluatePublished, arguments, prog, positional=(), others=groups)

    launch = prepare_environment()
    with importing():
        from accel_train.analysis.published import evaluate_published

    measured = evaluate_published(
        launch, overrides, split=options.split, predictions=options.predictions, output=options.output
    )
    return 1 if measured.unwritten else 0
