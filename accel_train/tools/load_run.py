"""Opens a run: its configuration, a new model like its own, its data, and all of this as a `LoadedRun`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from accel_train import models
from accel_train.checkpoint.reading import one_of_run
from accel_train.config.options import parse_run
from accel_train.config.schema import Config, Model, value
from accel_train.config.url import is_url
from accel_train.data.sources.files.encoded import read_image
from accel_train.data.sources.files.images import ImageError, decode, to_tensor
from accel_train.data.sources.load import splits_of
from accel_train.data.sources.splits import Splits
from accel_train.errors import UntrustedError, UserError, counted, first_of, one_line
from accel_train.models.weights import is_hub_name
from accel_train.ownership.owner import read_result
from accel_train.records.model_info import FILE, ModelInfo, read_model_info
from accel_train.records.provenance import metric_key
from accel_train.tools.inference import Prediction, Preprocessing, classify_files
from accel_train.untrusted import read_json_lines
from accel_train.user_code.loading import import_context, kept_text
from accel_train.user_code.reference import GIVEN, parse_reference, short_name, texts_of


def read_config(run: Path, *, uses: Sequence[str], trust_code: bool, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run`, with the options `overrides`. Runs none of its code.

    `uses`: the options whose code will be run, if they name a user's own code; with "data.name" the data will be read,
    and with "model.name" the model be made. The run may be somebody else's: raises UntrustedError if that would execute
    or fetch what the run, not one of `overrides`, names, unless `trust_code`. Then code is the text that the run keeps.
    The folder of --data.stage, into which files are copied, is the run's with `trust_code` alone, else the default.
    Objects that were given (user_code/reference.py) take the place of those of the run. Raises UserError.
    """
    config = parse_run(run, overrides)
    named = {word.removeprefix("--").partition("=")[0].replace("_", "-") for word in overrides if word[:2] == "--"}
    given = {option: name for option, (name, _) in GIVEN.items() if option in uses}
    would = []
    for option in uses:
        if option in named or option in given:
            continue
        texts = []
        for text in texts_of(value(config, option)):
            reference = parse_reference(option, text)
            if reference is not None:
                path = kept_text(metric_key(text) if option == "metrics" else option, reference, run)
                folder = import_context(path)[0]
                places = "the environment" if folder is None else f"{folder} or the environment"
                would.append(f"run --{option} {text} (its text is {path}; what it imports comes from {places})")
                text = f"{path.absolute()}:{reference.name}"
            texts.append(text)
        config = _with(config, option, tuple(texts) if option == "metrics" else texts[0])
    would += _arguments(config, uses) if "model.kwargs" not in named else []
    would += _fetched(config, named) if "data.name" in uses and "data.name" not in given else []
    if would and not trust_code:
        raise UntrustedError(f"{run} is a run, and this would {' and '.join(would)}")
    for option, name in given.items():
        config = _with(config, option, name)
    return config if trust_code or "data.stage" in named else _with(config, "data.stage", None)


def _with(config: Config, option: str, setting: Any) -> Config:
    group, _, name = option.rpartition(".")
    changed: Any = {name: setting}
    if group:
        changed = {group: dataclasses.replace(getattr(config, group), **changed)}
    return dataclasses.replace(config, **changed)


def _arguments(config: Config, uses: Sequence[str]) -> list[str]:
    """What the arguments of a library's model may do, if they are more than plain values and lists of these."""
    if "model.name" not in uses or parse_reference("model.name", config.model.name) is not None:
        return []  # the user's own code is judged with its arguments
    arguments = json.loads(config.model.kwargs or "{}")
    return [
        f"use --model.kwargs {one_line(repr(name), 80)}, which is no plain value (see config.yaml)"
        for name, argument in arguments.items()
        if not _is_plain(argument)
    ][:1]


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(_is_plain(item) for item in argument)
    return argument is None or isinstance(argument, (bool, int, float, str))


def _fetched(config: Config, named: Container[str]) -> list[str]:
    """What would be fetched for the data that the run names, its URL or data set of a hub, and into which folder."""
    stage = config.data.stage
    target = "" if stage is None or "data.stage" in named else f" into --data.stage {stage}"
    if "data.name" not in named and config.data.name.startswith("hfds/"):
        return [f"fetch --data.name {config.data.name}{target}"]
    if "data.root" not in named and is_url(config.data.root):
        return [f"fetch --data.root {config.data.root}{target}"]
    return []


def data_of_run(run: Path, *, trust_code: bool) -> tuple[Config, Splits]:
    """Return the configuration of the run in the folder `run` and the data that it names, if that is on this machine:
    nothing is downloaded. Raises UserError; see `read_config` for `trust_code`."""
    config = read_config(run, uses=("data.name",), trust_code=trust_code)
    return config, splits_of(config, download=False)


def empty_model(model: Model, info: ModelInfo) -> nn.Module:
    """Return the model of a run without its weights, on the CPU. Raises UserError if it cannot be created."""
    if is_hub_name(model.name) and info.origin.model != model.name:
        raise UserError(
            f"{FILE} does not have the architecture of {model.name}; copy it again from where the run was trained."
        )
    return models.create_model(
        model,
        num_classes=len(info.classes),
        channels=info.channels,
        image_size=info.training_size,
        published=False,
        origin=info.origin,
    )


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
        return list(self.classify(list(images), top_k, threshold))

    def classify(
        self, files: Sequence[Path], top_k: int | None, threshold: float | None = None, **options: Any
    ) -> Iterator[Prediction]:
        """Yield the prediction of each file. For `options` see `classify_files`. Raises UserError."""
        most = self.config.data.max_pixels
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
