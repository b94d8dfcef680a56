"""A run opened in Python: its model, what prepares images for it, its classes and its figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from accel_train.analysis.inference.predict import Prediction, classify_files
from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.load_run import empty_model, read_config
from accel_train.checkpoint.weights import one_of_run
from accel_train.config.schema import Config
from accel_train.data.sources.files.encoded import read_image
from accel_train.data.sources.files.images import ImageError, decode, to_tensor
from accel_train.errors import UserError, counted, first_of
from accel_train.ownership.generation import read_result
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.untrusted import read_json_lines
from accel_train.user_code.reference import short_name


@dataclass(frozen=True)
class LoadedRun:
    """A run whose model is in evaluation mode, on the CPU unless it was loaded for another device."""

    path: Path
    config: Config
    info: ModelInfo
    model: nn.Module
    """float32 [b, channels, size, size] to logits [b, classes]."""
    weights: Path
    """The file of the model's weights: the EMA's if the run has one. A run that trains may have deleted it."""
    preprocessing: Preprocessing

    def __repr__(self) -> str:
        info, result = self.info, self.result or {}
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        test = {name: value for name, value in result.items() if name.startswith("test_") and isinstance(value, float)}
        figures = ", ".join(f"{name} {value:.4f}" for name, value in test.items())
        name = short_name("model.name", self.config.model.name)
        return "\n".join(
            [
                f"LoadedRun({str(self.path)!r})",
                f"  model    {name}, {parameters:,} parameters, {self.weights}",
                f"  input    {info.channels} x {info.image_size} x {info.image_size} pixels",
                f"  classes  {len(info.classes)}: {first_of(info.classes, 5)}",
                f"  result   {counted(result['epochs'], 'epoch')}, {figures}" if result else "  result   not finished",
            ]
        )

    @property
    def title(self) -> str:
        """Names the model and the file of its weights."""
        kind = " (EMA)" if self.weights.stem == "ema" else ""
        return f"{short_name('model.name', self.config.model.name)}, weights: {self.weights}{kind}"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.info.classes

    def transform(self, image: Image.Image | str | Path | Tensor, *, max_pixels: int | None = None) -> Tensor:
        """The model's input for one image, float32 [channels, size, size], as in the run's evaluation.

        `image`: a PIL image, an image file, or a tensor [channels, H, W] of the type that the data has: uint8, or
        float32 from a user's own Dataset. `max_pixels`: of a file; None: as in training. Raises UserError if a file
        cannot be read.
        """
        try:
            if isinstance(image, (str, Path)):
                most = max_pixels or self.config.data.max_pixels
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
        return list(self.classify(list(images), top_k, threshold))

    def classify(
        self,
        files: Sequence[Path],
        top_k: int | None,
        threshold: float | None = None,
        max_pixels: int | None = None,
        **options: Any,
    ) -> Iterator[Prediction]:
        """Yield the prediction of each file. `max_pixels`: None: as in training. For `options` see `classify_files`.
        Raises UserError."""
        most = max_pixels or self.config.data.max_pixels
        return classify_files(self.model, self.preprocessing, self.info, files, top_k, threshold, most, **options)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind: "train", "eval", "checkpoint" or "event". A torn line is left out."""
        return list(read_json_lines(self.path / "metrics.jsonl", kind))

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None if the run is not finished."""
        return read_result(self.path) or None


def load(
    run: Path,
    checkpoint: Path | None = None,
    *,
    weights: str | None = None,
    trust_code: bool = False,
    device: torch.device | str = "cpu",
    overrides: Sequence[str] = (),
) -> LoadedRun:
    """Open the run in the folder `run`. Raises UserError; see `read_config` for `trust_code`.

    `weights`: "model" or "ema"; None: the EMA's if there is one. `overrides`: options that replace the run's, for
    images of another size: --model.eval-image-size, --augment.resize, --augment.crop-fraction.
    """
    config = read_config(run, uses=("model.name",), trust_code=trust_code, overrides=overrides)
    info = read_model_info(run).at_size(config.model.eval_image_size)
    chosen = one_of_run(run, checkpoint, weights)
    # What only training has: this model computes everything once.
    settings = dataclasses.replace(config.model, gradient_checkpointing=False, freeze_body=False, freeze=())
    model = empty_model(settings, info)
    chosen.load_into(model)
    preprocessing = Preprocessing(info, config.augment, device)
    return LoadedRun(run, config, info, model.eval().to(device), chosen.file, preprocessing)
