"""A run opened in Python: its model, what prepares images for it, its classes and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.analysis.load_run import load_model, read_config
from accel_train.analysis.predict import Prediction, classify_files
from accel_train.analysis.preprocessing import Preprocessing
from accel_train.checkpoint.weights import one_of_run
from accel_train.config.schema import Config
from accel_train.data.sources.files.encoded import read_image
from accel_train.data.sources.files.images import ImageError, decode, to_tensor
from accel_train.errors import UserError
from accel_train.ownership.generation import read_result
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.untrusted import read_json_lines


@dataclass(frozen=True)
class LoadedRun:
    """A run whose model is on the CPU, in evaluation mode."""

    path: Path
    config: Config
    info: ModelInfo
    model: nn.Module
    """float32 [b, channels, size, size] to logits [b, classes]."""
    weights: Path
    """The file of the model's weights: the EMA's if the run has one. A run that trains may have deleted it."""
    preprocessing: Preprocessing

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.info.classes

    def transform(self, image: Image.Image | str | Path | Tensor) -> Tensor:
        """The model's input for one image, float32 [channels, size, size], as in the run's evaluation.

        `image`: a PIL image, an image file, or a tensor [channels, H, W] of the type that the data has: uint8, or
        float32 from a user's own Dataset. Raises UserError if a file cannot be read.
        """
        try:
            if isinstance(image, (str, Path)):
                most = self.config.data.max_pixels
                image = decode(read_image(Path(image), most), self.info.channels, most, self.info.range)
            elif isinstance(image, Image.Image):
                image = to_tensor(image, self.info.channels, self.info.range)
        except (ImageError, OSError) as error:
            raise UserError(f"{image} cannot be read: {error}.") from error
        wanted = torch.float32 if self.info.full_scale == 1 else torch.uint8
        if image.dtype != wanted:
            raise UserError(f"the run's images are {wanted}, found {image.dtype}.")
        return self.preprocessing.to_input(self.preprocessing.resize(image))[0]

    def predict(
        self, images: Sequence[Path], *, top_k: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """The most probable classes of image files: see `api.predict`."""
        if top_k is None and not self.info.multi_label:
            top_k = 5
        files, most_pixels = list(images), self.config.data.max_pixels
        return list(classify_files(self.model, self.preprocessing, self.info, files, top_k, threshold, most_pixels))

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind: "train", "eval", "checkpoint" or "event". A torn line is left out."""
        return list(read_json_lines(self.path / "metrics.jsonl", kind))

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None if the run is not finished."""
        return read_result(self.path) or None


def load(run: Path, checkpoint: Path | None = None, *, trust_code: bool = False) -> LoadedRun:
    """Open the run in the folder `run`. Raises UserError; see `read_config` for `trust_code`."""
    config = read_config(run, uses=("model.name",), trust_code=trust_code)
    info = read_model_info(run)
    weights = one_of_run(run, checkpoint)[1]
    model = load_model(config.model, info, weights)
    return LoadedRun(run, config, info, model, weights.file, Preprocessing(info, config.augment))
