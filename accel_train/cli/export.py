"""`accel-train export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from accel_train.cli.common import importing
from accel_train.config.options import CommandOptions, parse_command
from accel_train.config.recipe import not_a_run
from accel_train.errors import UserError, print_line
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Export(CommandOptions):
    """Write a run's model for other programs: weights, class names and preprocessing, in one folder.

    The export is then loaded and compared with the run on images of its data, as tensors and from files. If they
    disagree, the exit code is 1. docs/export.md has a script that needs only onnxruntime, NumPy and Pillow.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    format: Literal["timm", "onnx", "pt2"] | None = None
    """timm: a directory for timm.create_model; onnx: ONNX; pt2: torch.export. It must be given."""
    output: Path | None = None
    """Folder to write; default: RUN/export-FORMAT. It may hold an earlier export, which is replaced."""
    checkpoint: Path | None = None
    """best (by --best-metric on the validation split), last, or a checkpoint such as update-00001234; default: last,
    the final model, or the newest checkpoint of a run that has not finished."""
    weights: Literal["model", "ema"] | None = None
    """Which weights; default: the EMA if the run has one."""
    trust_code: bool = False
    """Execute the code that the run keeps (RUN/code) and fetch the data that it names; read both first."""

    def mistakes(self) -> list[str]:
        return not_a_run(self.run)


def export(arguments: Sequence[str]) -> int:
    """Run `accel-train export`; return the exit code."""
    options, _ = parse_command(Export, arguments, "accel-train export", positional=("run",))
    if options.format is None:
        raise UserError("--format is missing; choose timm, onnx or pt2.")
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.export.export import export

    result = export(
        launch,
        options.run,
        options.format,
        output=options.output,
        checkpoint=options.checkpoint,
        weights=options.weights,
        trust_code=options.trust_code,
    )
    print_line(f"export: {result.folder}")
    return 0
