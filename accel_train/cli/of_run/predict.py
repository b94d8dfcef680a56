"""`accel-train predict`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one, importing, not_a_run
from accel_train.config.options import CommandOptions, parse_command
from accel_train.launch.environment import prepare_environment


@dataclass(frozen=True)
class Predict(CommandOptions):
    """Show the most probable classes of images, according to a run's model.

    The row of an image that cannot be read says so; the other images are classified, and the exit code is 1.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    images: Annotated[Positional[tuple[Path, ...]], arg(metavar="IMAGE|FOLDER …")]
    """Image files, or folders of them."""
    top_k: int | None = None
    """Number of classes for each image; default: 1 on the console, 5 in a file; with several labels an image: all."""
    threshold: float | None = None
    """Show the classes with at least this probability, for runs with several labels an image; default: 0.5."""
    output: Path | None = None
    """Write to this .csv or .jsonl file instead of a table on the console."""
    batch_size: int = 64
    """Images in one forward pass."""
    max_pixels: int | None = None
    """Refuse larger images; default: as in training (--data.max-pixels)."""
    trust_code: bool = False
    """Run the code that the run keeps of its own model and data (RUN/code), although it may be somebody else's."""

    def mistakes(self) -> list[str]:
        mistakes = below_one(top_k=self.top_k, batch_size=self.batch_size, max_pixels=self.max_pixels)
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            mistakes.append(f"--threshold: expected a number from 0 to 1, found {self.threshold}.")
        if self.output is not None and self.output.suffix not in (".csv", ".jsonl"):
            mistakes.append(f"--output: expected a name that ends in .csv or .jsonl, found '{self.output}'.")
        mistakes += not_a_run(self.run)
        return mistakes + [f"{image}: no such image or folder." for image in self.images if not image.exists()]


def predict(arguments: Sequence[str]) -> int:
    """Run `accel-train predict`; return the exit code."""
    options, _ = parse_command(Predict, arguments, "accel-train predict", positional=("run", "images"))
    launch = prepare_environment()
    with importing(str(options.run)):
        from accel_train.analysis.predict import predict

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `predict … | head` ends quietly
    return predict(
        launch,
        options.run,
        options.images,
        top_k=options.top_k,
        threshold=options.threshold,
        output=options.output,
        batch_size=options.batch_size,
        max_pixels=options.max_pixels,
        trust_code=options.trust_code,
    )
