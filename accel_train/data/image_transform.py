"""Transforms of one image at a time, in the worker processes: crop, resize, policies, a user's own transform, flip.

Input and output are uint8, a quarter of float32's bytes. Transforms that work on a whole batch (normalisation, erasing,
mixing) run later on the device (batch_transform.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import Stream, resize_default
from accel_train.data.sources.images import Box, LazyImage
from accel_train.data.sources.user import as_pixels, kind_of
from accel_train.errors import UserError, reason_of
from accel_train.keyed import restored_generators, seed_generators, uniform, uniforms
from accel_train.user_code import load, parse_reference, showing_user_lines

if TYPE_CHECKING:
    from PIL import Image

Step = Callable[[Tensor], Tensor]
TRIES = 10  # attempts to draw a box inside the image, as in torchvision


class ImageTransform:
    """Transforms images of any size into one uint8 tensor [b, C, size, size], channels last in memory.

    In training, an image's random parameters follow from its key alone. Training decodes a JPEG that is at least twice
    as large as needed at a smaller scale (see `LazyImage.reduced`): 1.4 to 2 times as fast, with a median PSNR of 48 dB
    against Pillow's resize of the full image, where decoding all of it has 61 dB. Evaluation decodes the full image.
    """

    def __init__(
        self,
        augment: Augment,
        size: int,
        *,
        training: bool,
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
    ) -> None:
        """`mean`: of each channel, 0 to 1; timm's policies have this colour outside the image."""
        self.augment, self.size, self.training = augment, size, training
        self.crop = augment.crop if training else "center"
        self.short_side = augment.resize or resize_default(size)
        self.interpolation = augment.interpolation_of(training=training)
        crops: list[Step] = []
        if self.crop == "random":
            from torchvision.transforms import v2

            padding = {"padding": augment.pad or None, "padding_mode": augment.pad_mode}
            crops.append(v2.RandomCrop(size, pad_if_needed=True, **padding))
        elif self.crop == "center":
            crops.append(partial(center_cropped, size=size))
        own: list[Step] = []
        if training and augment.own != "none":
            own = [OwnTransform(augment.own)]
        # The steps of an image that was resized so.
        self.steps: dict[str, list[Step]] = {}
        for mode in ("bilinear", "bicubic") if self.interpolation == "random" else (self.interpolation,):
            drawn = "random" if augment.timm_policy and self.interpolation == "random" else mode
            steps = image_steps(augment, size, drawn, mean) if training else []
            self.steps[mode] = [*crops, *steps, *own]
        self.is_random = training and augment.draws_globally

    def __call__(self, images: Sequence[Tensor | LazyImage], keys: Tensor) -> Tensor:
        """`images`: each uint8 [C, H, W] or not yet decoded; `keys`: int64 [b]. Returns uint8 [b, C, size, size]."""
        modes = self._modes(keys)
        decoded = self._resized(images, modes, keys)
        flips = drawn_flips(keys, self.augment, training=self.training)
        batch: Tensor | None = None
        # What policies and the user's own transform draw from, all processes and workers seed with each image's key.
        with restored_generators() if self.is_random else contextlib.nullcontext():
            for index, (image, mode, word) in enumerate(zip(decoded, modes, keys.tolist(), strict=True)):
                if self.is_random:
                    seed_generators(word)
                for step in self.steps[mode]:
                    image = step(image)
                if batch is None:
                    batch = image.new_empty((len(images), self.size, self.size, len(image)))
                batch[index] = (image.flip(flips[index]) if flips[index] else image).permute(1, 2, 0)
        assert batch is not None
        return batch.permute(0, 3, 1, 2)

    def _resized(self, images: Sequence[Tensor | LazyImage], modes: Sequence[str], keys: Tensor) -> Iterator[Tensor]:
        """Yield each image, resized and, unless that is one of `steps`, cropped."""
        sizes = [_size(image) for image in images]
        if self.crop == "resized":
            heights, widths = torch.tensor(sizes).T
            boxes = crop_boxes(keys, heights, widths, self.augment.scale, self.augment.ratio).tolist()
            for image, mode, box in zip(images, modes, boxes, strict=True):
                yield self._resized_box(image, mode, box, self.size, self.size)
        else:
            for image, mode, (height, width) in zip(images, modes, sizes, strict=True):
                squashed = self.crop == "squash"
                target = (self.size, self.size) if squashed else sides(height, width, self.short_side)
                yield self._resized_box(image, mode, None, *target)

    def _modes(self, keys: Tensor) -> Sequence[str]:
        """How each image is resized."""
        if self.interpolation != "random":
            return (self.interpolation,) * len(keys)
        return ["bicubic" if drawn else "bilinear" for drawn in (uniform(keys, Stream.INTERPOLATION) >= 0.5).tolist()]

    def _resized_box(self, image: Tensor | LazyImage, mode: str, box: Box | None, height: int, width: int) -> Tensor:
        """The box of the image (None: all of it), resized to this height and width. It is cropped first, so that only
        its pixels are resized."""
        top, left, high, wide = box or (0, 0, *_size(image))
        if isinstance(image, LazyImage):
            reduction = self._reduction(image, *min((high, height), (wide, width), key=lambda pair: pair[0] / pair[1]))
            if reduction > 1:
                return image.reduced((top, left, high, wide), height, width, reduction, mode)
            image = image.pixels()
        return resized(image[:, top : top + high, left : left + wide], height, width, mode)

    def _reduction(self, image: LazyImage, side: int, needed: int) -> int:
        """The largest JPEG scale factor at which `side` pixels of the image still give `needed` pixels."""
        if not (self.training and image.reducible):
            return 1
        return max(factor for factor in (1, 2, 4, 8) if factor == 1 or side >= factor * needed)


def drawn_flips(keys: Tensor, augment: Augment, *, training: bool) -> list[tuple[int, ...]]:
    """The dimensions along which each image [C, H, W] is flipped, drawn from the keys (int64 [b])."""
    flips: list[tuple[int, ...]] = [()] * len(keys)
    for dimension, stream, probability in (
        (1, Stream.VERTICAL_FLIP, augment.vertical_flip),
        (2, Stream.FLIP, augment.flip),
    ):
        if training and probability:
            flipped = (uniform(keys, stream) < probability).tolist()
            flips = [(*before, dimension) if flip else before for before, flip in zip(flips, flipped, strict=True)]
    return flips


def crop_boxes(
    keys: Tensor, heights: Tensor, widths: Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Boxes of torchvision's RandomResizedCrop (Szegedy et al., 2015, https://arxiv.org/abs/1409.4842), each drawn from
    its image's key.

    `heights`, `widths`: int64 [b], of the images. `scale`: bounds of the share of the area; `ratio`: of width / height.
    Returns int64 [b, 4]: top, left, height, width. The result is the first of ten boxes that is inside the image, or
    else the largest central box whose ratio is within the bounds.
    """
    streams = [Stream.RESIZED + number for number in range(2 * TRIES)]
    draws = uniforms(keys, [Stream.RESIZED_TOP, Stream.RESIZED_LEFT, *streams]).double()
    areas = (scale[0] + draws[2::2] * (scale[1] - scale[0])) * (heights * widths)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = torch.exp(low + draws[3::2] * (high - low))
    tried_h, tried_w = torch.sqrt(areas / ratios).round().long(), torch.sqrt(areas * ratios).round().long()
    inside = (tried_h > 0) & (tried_h <= heights) & (tried_w > 0) & (tried_w <= widths)
    first = inside.to(torch.uint8).argmax(0)[None]  # of equal values, argmax returns the first index

    own = widths / heights
    fallback_h = torch.where(own < ratio[0], (widths / ratio[0]).round().long(), heights)
    fallback_w = torch.where(own > ratio[1], (heights * ratio[1]).round().long(), widths)
    any_inside = inside.any(0)
    height = torch.where(any_inside, tried_h.gather(0, first)[0], torch.minimum(fallback_h, heights))
    width = torch.where(any_inside, tried_w.gather(0, first)[0], torch.minimum(fallback_w, widths))
    top = torch.where(any_inside, (draws[0] * (heights - height + 1)).long(), (heights - height) // 2)
    left = torch.where(any_inside, (draws[1] * (widths - width + 1)).long(), (widths - width) // 2)
    return torch.stack([top, left, height, width], 1)


def _size(image: Tensor | LazyImage) -> tuple[int, int]:
    return (image.shape[1], image.shape[2]) if isinstance(image, Tensor) else (image.height, image.width)


# The policies, which change one image's geometry and colours after its crop.
#
# They are torchvision's or timm's code. They draw from global generators: ImageTransform seeds them for each image.


AUTOAUGMENT = {"autoaugment": "IMAGENET", "autoaugment_cifar10": "CIFAR10", "autoaugment_svhn": "SVHN"}
RESAMPLING = {"bilinear": 2, "bicubic": 3}  # PIL's numbers


def image_steps(augment: Augment, size: int, interpolation: str, mean: tuple[float, ...]) -> list[Step]:
    """The steps on a tensor uint8 [C, size, size], of which each returns such a tensor; [] if there are none.

    They turn and shift PIL images with `interpolation` (or random), as torchvision's training script does: its tensors
    cannot be turned bicubically. torchvision's AugMix computes with tensors in any case, and so bilinearly.
    `mean`: of each channel, 0 to 1.
    """
    if augment.policy == "none":
        return []
    from torchvision.transforms import v2

    mode = v2.InterpolationMode("bilinear" if interpolation == "random" else interpolation)
    if augment.policy == "augmix":
        return [v2.AugMix()]
    if augment.timm_policy:
        return _of_pil(v2.Lambda(_timm_policy(augment, size, interpolation, mean)))
    if augment.policy == "randaugment":
        return _of_pil(v2.RandAugment(augment.randaugment_ops, augment.randaugment_magnitude, interpolation=mode))
    if augment.policy == "trivialaugment":
        return _of_pil(v2.TrivialAugmentWide(interpolation=mode))
    return _of_pil(v2.AutoAugment(v2.AutoAugmentPolicy[AUTOAUGMENT[augment.policy]], mode))


def _of_pil(step: Any) -> list[Step]:
    """The step, of PIL images, as steps of tensors."""
    from torchvision.transforms import v2

    return [v2.ToPILImage(), step, v2.PILToTensor()]


def _timm_policy(augment: Augment, size: int, interpolation: str, mean: tuple[float, ...]) -> Callable[[Any], Any]:
    """timm's transform of a PIL image, with the settings that timm's create_transform gives it.

    Raises UserError if timm does not take the policy.
    """
    from PIL import Image
    from timm.data import auto_augment

    colour = tuple(min(255, round(255 * value)) for value in mean)
    settings: dict[str, Any] = {"translate_const": int(size * 0.45), "img_mean": colour if len(mean) > 1 else colour[0]}
    if interpolation != "random":  # else timm draws one for each operation
        settings["interpolation"] = RESAMPLING[interpolation]
    create: Callable[..., Callable[[Any], Any]] = auto_augment.auto_augment_transform
    name = augment.policy.partition("-")[0]
    if name == "rand":
        create = auto_augment.rand_augment_transform
    elif name == "augmix":
        create = auto_augment.augment_and_mix_transform
        settings["translate_pct"] = 0.3
    try:
        transform: Any = create(augment.policy, settings)
        groups = transform.policy if hasattr(transform, "policy") else [transform.ops]
        for operation in (operation for group in groups for operation in group):
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize
        with restored_generators():
            transform(Image.new("RGB" if len(mean) > 1 else "L", (8, 8)))
    except (AssertionError, ValueError) as error:
        raise UserError(f"--augment.policy: timm does not take {augment.policy} ({reason_of(error)}).") from error
    return transform  # type: ignore[no-any-return]


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's, which keeps 0 bits at some strengths: Pillow before 13 made the image black, Pillow 13 refuses."""
    from PIL import ImageOps

    return ImageOps.posterize(image, bits) if bits in range(1, 8) else image.point(lambda value: value * (bits > 0))


# --augment.own: a user's own transform of one image, of torchvision, of albumentations, or a function.


OPTION = "augment.own"


class OwnTransform(torch.nn.Module):
    """Calls the user's transform with a tensor uint8 [C, H, W]; one of albumentations with an array [H, W, C].

    It draws from torch's, NumPy's and Python's global generators, which are seeded for each image; one with
    `set_random_seed` (albumentations) has generators of its own, which are seeded here. Sent to a data worker, it
    imports the user's file there.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        reference = parse_reference(OPTION, text)
        assert reference is not None, text
        self.reference = reference
        self.function: Any = load(OPTION, reference)

    def __getstate__(self) -> str:
        return str(self.reference)

    def __setstate__(self, text: str) -> None:
        self.__init__(text)  # type: ignore[misc]

    def forward(self, image: Tensor) -> Tensor:
        """Returns uint8 of the same shape. Raises UserError if the user's transform returns something else."""
        with showing_user_lines(OPTION, self.reference):
            if hasattr(self.function, "set_random_seed"):
                self.function.set_random_seed(int(torch.randint(2**32, ())))
            if type(self.function).__module__.startswith("albumentations"):
                found = self.function(image=image.permute(1, 2, 0).contiguous().numpy())["image"]
            else:
                found = self.function(image)
            pixels = found
            if isinstance(found, np.ndarray):
                pixels = torch.from_numpy(np.ascontiguousarray(found)).permute(2, 0, 1)
            pixels = as_pixels(pixels, len(image))
        if pixels is None or pixels.dtype != torch.uint8 or pixels.shape != image.shape:
            kind = kind_of(found).replace("of type", "a value of type")
            raise UserError(
                f"--{OPTION} {self.reference.short}: returned {kind} for a uint8 tensor {list(image.shape)}; expected "
                "uint8 of that shape.",
                every_process=False,
            )
        return pixels


def check_own(text: str, channels: int, size: int) -> None:
    """Load the user's transform and try it with an image. Raises UserError if it cannot be trained with.

    With the same random numbers it must return the same pixels, whatever it was called with before: else a sample would
    be another one on another number of processes, or after a restart.
    """
    transform = OwnTransform(text)
    image = torch.randint(256, (channels, size, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = []
    with restored_generators():
        for key in (1, 2, 3, 1):
            seed_generators(key)
            found.append(transform(image.clone()))
    if not torch.equal(found[0], found[3]):
        raise UserError(
            f"--{OPTION} {transform.reference.short}: returned two images for the same image and the same random "
            "numbers, so that a run could not be repeated. Draw only from torch, random or numpy.random (not from a "
            "generator of its own), and keep nothing from one call to the next."
        )


# Resizes images, with the same pixels in training and evaluation.


def sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width of an image resized to this short side, rounded as in torchvision's Resize."""
    short = min(height, width)
    return int(short_side * height / short), int(short_side * width / short)


def resized_to_short_side(image: Tensor, short_side: int) -> Tensor:
    """`image`, uint8 [C, H, W], resized so that the shorter of its sides has `short_side` pixels.

    The pixels are those of torchvision's Resize in 0.29. Older versions of it computed in float32 on some CPUs, so that
    pixels differed by 1.
    """
    return resized(image, *sides(image.shape[1], image.shape[2], short_side))


def resized(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """`image`, uint8 [C, H, W] on the CPU, resized to uint8 [C, height, width] with antialiasing."""
    if image.shape[1:] == (height, width):
        return image
    # image[None] would not count as channels last, and interpolate would copy the pixels twice.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, (height, width), mode=interpolation, antialias=True)[0]


def center_cropped(image: Tensor, size: int) -> Tensor:
    """The middle of `image`, [C, H, W], as [C, size, size]; zeros around one that is smaller. As torchvision's."""
    height, width = image.shape[1:]
    if height < size or width < size:
        down, across = max(size - height, 0), max(size - width, 0)
        image = F.pad(image, (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2))
        height, width = image.shape[1:]
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[:, top : top + size, left : left + size]
