"""Opens a run: its configuration, its data, a new model like its own, and the classes of images that it predicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from accel_train import models
from accel_train.checkpoint.reading import one_of_run
from accel_train.config.checks import check_resize
from accel_train.config.options import given_keys, parse
from accel_train.config.recipe import not_a_run
from accel_train.config.schema import Augment, Config, Data, Model, value
from accel_train.config.url import is_url
from accel_train.data.batch_transform import BatchTransform
from accel_train.data.image_transform import ImageTransform
from accel_train.data.sources.folder import find_images, ignored_text
from accel_train.data.sources.images import ImageError, decode, read_image, to_tensor
from accel_train.data.sources.load import splits_of
from accel_train.data.sources.splits import Splits
from accel_train.errors import UntrustedError, UserError, one_line, raise_mistakes
from accel_train.files import read_json_lines
from accel_train.launch.process import available_cores
from accel_train.ownership.owner import read_result
from accel_train.records.directory import metric_key
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.user_code import GIVEN, import_context, kept_text, parse_reference, short_name, texts_of


class Preprocessing:
    """The resizing, cropping and normalisation of a run's evaluation."""

    def __init__(self, info: ModelInfo, augment: Augment, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        augment = augment.in_evaluation(info.image_size)
        check_resize(augment, info.image_size)
        native = info.native_size
        if native is None:
            self._image = ImageTransform(augment, info.image_size, training=False)
        else:  # images of the dataset's size stay as they are here; `to_input` treats them as in evaluation
            unchanged = Augment(resize=native, interpolation=augment.interpolation)
            self._image = ImageTransform(unchanged, native, training=False)
        self._batch = BatchTransform(
            augment,
            size=info.image_size,
            mean=info.mean,
            std=info.std,
            full_scale=info.full_scale,
            num_classes=len(info.classes),
            training=False,
            per_image=native is None,
            device=self.device,
        )

    def resize(self, image: Tensor) -> Tensor:
        """`image` [C, H, W] of any size as [1, C, h, w], where h and w are the same for all images."""
        resized: Tensor = self._image([image], torch.zeros(1))
        return resized

    def to_input(self, images: Tensor) -> Tensor:
        """The model's input, float32 [b, C, size, size] on the device, from images [b, C, h, w] of `resize`."""
        pixels = images.to(self.device)
        unused = torch.zeros(len(pixels), dtype=torch.int64, device=self.device)
        inputs, _ = self._batch({"images": pixels, "labels": unused, "keys": unused, "weights": unused})
        return inputs


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, the most probable one first."""

    image: Path
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    """They add up to 1 over all classes, of which only the first are here. If an image may have several labels, each
    class has one by itself, and only those from a threshold on are here."""
    error: str = ""
    """Why the image cannot be read; there are no classes then."""


BATCH_SIZE = 64  # of `LoadedRun.classify`


def check_can_classify(info: ModelInfo, threshold: float | None) -> None:
    """Raise UserError if image files cannot be prepared for the model as its data was, or if there is a threshold, but
    each image has one label: its most probable class."""
    if not info.takes_files:
        raise UserError(
            "the model was trained on tensors that the user's own data prepares, so image files cannot be prepared in "
            "the same way. `accel-train evaluate` measures it on that data."
        )
    if threshold is not None and info.task.threshold is None:
        raise UserError(
            f"--threshold {threshold}: the run was trained with one label an image, the most probable one; use --top-k."
        )


def image_files(path: Path) -> tuple[list[Path], str]:
    """Return the file itself, whatever its name, or the sorted image files below a folder; and what is left out there.

    Raises UserError if a folder has none.
    """
    if not path.is_dir():
        return [path], ""
    contents = find_images(path)
    found = ignored_text(contents.others)
    if not contents.images:
        others = f" (found {found})" if found else ""
        raise UserError(f"{path}: no image was found in this folder{others}; name image files or another folder.")
    count = contents.others.total()
    are = "files are not images by their names and are" if count > 1 else "file is not an image by its name and is"
    return [path / name for name in contents.images], f"{path}: {count} {are} left out: {found}." if found else ""


def read_config(run: Path, *, uses: Sequence[str], trust_code: bool, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run`, with the options `overrides`. Runs none of its code.

    `uses`: the options whose code will be run, if they name a user's own code; with "data.name" the data will be read,
    and with "model.name" the model be made. The run may be somebody else's: raises UntrustedError if that would execute
    or fetch what the run, not one of `overrides`, names, unless `trust_code`. Then code is the text that the run keeps.
    The folder of --data.stage, into which files are copied, is the run's with `trust_code` alone, else the default.
    Objects that were given (user_code.py) take the place of those of the run. Raises UserError.
    """
    raise_mistakes(not_a_run(run))
    config = parse([str(run / "config.yaml"), *overrides], checks_code=False)
    named = given_keys(overrides)
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


def may_download(config: Config, overrides: Sequence[str], *, trust_code: bool) -> bool:
    """Whether missing files of a published data set may be downloaded: not into a folder that only the run names."""
    given = given_keys(overrides)
    return trust_code or config.data.root == Data().root or "data.name" in given or "data.root" in given


def data_of_run(run: Path, *, trust_code: bool) -> tuple[Config, Splits]:
    """Return the configuration of the run in the folder `run` and the data that it names, if that is on this machine:
    nothing is downloaded. Raises UserError; see `read_config` for `trust_code`."""
    config = read_config(run, uses=("data.name",), trust_code=trust_code)
    return config, splits_of(config, download=False)


def empty_model(model: Model, info: ModelInfo) -> nn.Module:
    """Return the model of a run without its weights, on the CPU. Raises UserError if it cannot be created."""
    return models.create_model(
        model,
        num_classes=len(info.classes),
        channels=info.channels,
        image_size=info.training_size,
        pretrained=False,
    )


@dataclass(frozen=True)
class LoadedRun:
    """A run whose model is in evaluation mode, on the CPU unless it was loaded for another device."""

    path: Path
    config: Config = field(repr=False)
    info: ModelInfo = field(repr=False)
    model: nn.Module = field(repr=False)
    """float32 [b, channels, size, size] to logits [b, classes]."""
    weights: Path
    """The file of the model's weights: the EMA's if the run has one. A run that trains may have deleted it."""
    preprocessing: Preprocessing = field(repr=False)

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
                image = decode(read_image(Path(image)), self.info.channels)
            elif isinstance(image, Image.Image):
                image = to_tensor(image, self.info.channels)
        except (ImageError, OSError) as error:
            raise UserError(f"{image} cannot be read: {error}.") from error
        wanted = torch.float32 if self.info.full_scale == 1 else torch.uint8
        if image.dtype != wanted:
            raise UserError(f"the run's images are {wanted}, found {image.dtype}.")
        return self.preprocessing.to_input(self.preprocessing.resize(image))[0]

    def predict(
        self, images: Iterable[str | Path], *, top_k: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """Return the most probable classes of image files, the most probable one first, in the order of `images`.

        `top_k`: how many; default: 5, or if an image may have several labels, all with a probability of at least
        `threshold` (default: 0.5), which only such runs take. The prediction of a file that cannot be read has no
        classes, but an `error`.
        """
        if isinstance(images, (str, Path)):
            raise UserError(f"images: expected a list of paths, found one: give [{str(images)!r}].")
        top_k = self.info.task.top_k if top_k is None else top_k
        return list(self.classify([Path(image) for image in images], top_k, threshold))

    def classify(
        self,
        files: Sequence[Path],
        top_k: int | None,
        threshold: float | None = None,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Iterator[Prediction]:
        """Yield the prediction for each file, in their order. One that cannot be read gets an `error`.

        `top_k`: at most so many classes; None: all. `threshold`: the least probability, if an image may have several
        labels; None: 0.5. `autocast`: makes a context for the forward pass. Raises UserError if the run's model takes
        images that only the user's own code can prepare.
        """
        info = self.info
        check_can_classify(info, threshold)
        least = (info.task.threshold or 0.0) if threshold is None else threshold

        def read(path: Path) -> Tensor | str:
            try:
                return self.preprocessing.resize(decode(read_image(path), info.channels))
            except (ImageError, OSError) as error:
                return (isinstance(error, OSError) and error.strerror) or str(error)

        with ThreadPoolExecutor(available_cores()) as pool:
            for first in range(0, len(files), BATCH_SIZE):
                batch = files[first : first + BATCH_SIZE]
                images = list(pool.map(read, batch))
                readable = [image for image in images if isinstance(image, Tensor)]
                results: Iterator[tuple[list[int], list[float]]] = iter(())
                if readable:
                    with torch.inference_mode(), autocast():
                        logits = self.model(self.preprocessing.to_input(torch.cat(readable))).float()
                    best = info.task.probabilities(logits).topk(min(top_k or len(info.classes), len(info.classes)))
                    results = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                for path, image in zip(batch, images, strict=True):
                    if isinstance(image, Tensor):
                        labels, probabilities = next(results)
                        count = sum(probability >= least for probability in probabilities)  # in decreasing order
                        names = tuple(info.classes[label] for label in labels[:count])
                        yield Prediction(path, names, tuple(probabilities[:count]))
                    else:
                        yield Prediction(path, (), (), error=image)

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
) -> LoadedRun:
    """Open the run in the folder `run`. Raises UserError; see `read_config` for `trust_code`.

    `weights`: "model" or "ema"; None: the EMA's if there is one.
    """
    config = read_config(run, uses=("model.name",), trust_code=trust_code)
    info = read_model_info(run).at_size(config.model.eval_image_size)
    chosen = one_of_run(run, checkpoint, weights)
    # What only training has: this model computes everything once.
    settings = dataclasses.replace(config.model, gradient_checkpointing=False, freeze_body=False, freeze=())
    model = empty_model(settings, info)
    chosen.load_into(model)
    preprocessing = Preprocessing(info, config.augment, device)
    return LoadedRun(run, config, info, model.eval().to(device), chosen.file, preprocessing)
