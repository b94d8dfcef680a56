"""What is done to one image at a time, in the worker processes: crop, resize, torchvision's policies, flip.

Images come and go as uint8, so that a worker moves a quarter of the bytes; what can be done to a whole batch at once
(normalisation, erasing, mixing) waits for the device, in augment.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.data.order.keyed import uniform, uniforms
from accel_train.data.sources.images import Picture
from accel_train.data.transforms.parameters import Stream

TRIES = 10  # boxes that are drawn until one lies inside the image, as torchvision does


def resize_default(size: int) -> int:
    """Short side from which an input of `size` pixels is cut: 256 for 224, as evaluations of ImageNet do."""
    return round(size / 0.875)


class ImageTransform:
    """Turns images of any size into one uint8 tensor [b, C, size, size], in memory channels last.

    In training, what is random about an image follows from its key alone. Of a JPEG more than twice as large as is
    needed training decodes a smaller version (see `Picture.reduced`), unless `reduces` is false; evaluation decodes all
    there is.
    """

    def __init__(self, augment: Augment, size: int, *, training: bool, reduces: bool = True) -> None:
        self.augment, self.size, self.training = augment, size, training
        self.reduces = training and reduces
        self.short_side = augment.resize or resize_default(size)
        self.resized_crop = training and augment.crop == "resized"
        steps: list[torch.nn.Module] = []
        if not self.resized_crop:
            steps.append(v2.Resize(self.short_side, antialias=True))
            if training and augment.crop == "random":
                padding = {"padding": augment.pad or None, "padding_mode": augment.pad_mode}
                steps.append(v2.RandomCrop(size, pad_if_needed=True, **padding))
            else:
                steps.append(v2.CenterCrop(size))
        if training and augment.policy == "randaugment":
            steps.append(v2.RandAugment(augment.randaugment_ops, augment.randaugment_magnitude))
        elif training and augment.policy == "trivialaugment":
            steps.append(v2.TrivialAugmentWide())
        self.steps = torch.nn.Sequential(*steps)
        self.draws = training and (augment.policy != "none" or augment.crop == "random")

    def __call__(self, images: Sequence[Tensor | Picture], keys: Tensor) -> Tensor:
        """`images`: uint8 [C, H, W] each, or yet to be decoded; `keys`: int64 [b]. Returns uint8 [b, C, size, size]."""
        if self.resized_crop:
            boxes = drawn_boxes(images, keys, self.augment)
            turned = (self._resized_crop(image, *box) for image, box in zip(images, boxes, strict=True))
        else:
            turned = (self._whole(image) for image in images)
        mirrored = drawn_flips(keys, self.augment, training=self.training)
        batch: Tensor | None = None
        # torchvision's own transforms draw from torch's CPU generator: it is seeded with the key, for this image only,
        # and put back as it was.
        with torch.random.fork_rng(devices=[], enabled=self.draws):
            for at, (image, word) in enumerate(zip(turned, keys.tolist(), strict=True)):
                if self.draws:
                    torch.default_generator.manual_seed(word)  # torch.manual_seed would seed the GPUs', too
                image = self.steps(image)
                if batch is None:
                    batch = image.new_empty((len(images), self.size, self.size, len(image)))
                batch[at] = (image.flip(2) if mirrored[at] else image).permute(1, 2, 0)
        assert batch is not None
        return batch.permute(0, 3, 1, 2)

    def _whole(self, image: Tensor | Picture) -> Tensor:
        if isinstance(image, Tensor):
            return image
        reduction = self._reduction(image, min(image.height, image.width), self.short_side)
        if reduction > 1:
            box = 0, 0, image.height, image.width
            return image.reduced(box, *sides(image.height, image.width, self.short_side), reduction)
        return image.pixels()

    def _resized_crop(self, image: Tensor | Picture, top: int, left: int, height: int, width: int) -> Tensor:
        """The box of the image, brought to size x size: cropped first, so that no pixel is resized in vain."""
        if isinstance(image, Picture):
            reduction = self._reduction(image, min(height, width), self.size)
            if reduction > 1:
                return image.reduced((top, left, height, width), self.size, self.size, reduction)
            image = image.pixels()
        box = image[:, top : top + height, left : left + width]
        if box.shape[1:] == (self.size, self.size):
            return box
        return resized(box, self.size, self.size)

    def _reduction(self, image: Picture, side: int, needed: int) -> int:
        """The largest factor by which `side` pixels of the image may come smaller and are `needed` ones still."""
        if not (self.reduces and image.reducible):
            return 1
        return max(factor for factor in (1, 2, 4, 8) if factor == 1 or side >= factor * needed)


def drawn_boxes(images: Sequence[Tensor | Picture], keys: Tensor, augment: Augment) -> list[list[int]]:
    """Top, left, height and width of what crop=resized takes of each image, as its key (int64 [b]) says."""
    sizes = torch.tensor([_size(image) for image in images])
    boxes: list[list[int]] = crop_boxes(keys, sizes[:, 0], sizes[:, 1], augment.scale, augment.ratio).tolist()
    return boxes


def drawn_flips(keys: Tensor, augment: Augment, *, training: bool) -> list[bool]:
    """Which images are mirrored, as their keys (int64 [b]) say."""
    if not (training and augment.flip):
        return [False] * len(keys)
    flips: list[bool] = (uniform(keys, Stream.FLIP) < augment.flip).tolist()
    return flips


def crop_boxes(
    keys: Tensor, heights: Tensor, widths: Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Boxes of torchvision's RandomResizedCrop (Szegedy et al., 2015, https://arxiv.org/abs/1409.4842), each drawn from
    its image's key.

    `heights`, `widths`: int64 [b], of the images. `scale`: bounds of the share of the area; `ratio`: of width / height.
    Returns int64 [b, 4]: top, left, height, width. The first of ten boxes that lies inside the image is taken, else
    the largest one in the middle whose ratio is within the bounds.
    """
    streams = [Stream.RESIZED + number for number in range(2 * TRIES)]
    draws = uniforms(keys, [Stream.RESIZED_TOP, Stream.RESIZED_LEFT, *streams]).double()
    areas = (scale[0] + draws[2::2] * (scale[1] - scale[0])) * (heights * widths)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = torch.exp(low + draws[3::2] * (high - low))
    tried_h, tried_w = torch.sqrt(areas / ratios).round().long(), torch.sqrt(areas * ratios).round().long()
    inside = (tried_h > 0) & (tried_h <= heights) & (tried_w > 0) & (tried_w <= widths)
    first = inside.to(torch.uint8).argmax(0)[None]  # of equal ones the first

    own = widths / heights
    fallback_h = torch.where(own < ratio[0], (widths / ratio[0]).round().long(), heights)
    fallback_w = torch.where(own > ratio[1], (heights * ratio[1]).round().long(), widths)
    found = inside.any(0)
    height = torch.where(found, tried_h.gather(0, first)[0], torch.minimum(fallback_h, heights))
    width = torch.where(found, tried_w.gather(0, first)[0], torch.minimum(fallback_w, widths))
    top = torch.where(found, (draws[0] * (heights - height + 1)).long(), (heights - height) // 2)
    left = torch.where(found, (draws[1] * (widths - width + 1)).long(), (widths - width) // 2)
    return torch.stack([top, left, height, width], 1)


def _size(image: Tensor | Picture) -> tuple[int, int]:
    return (image.shape[1], image.shape[2]) if isinstance(image, Tensor) else (image.height, image.width)


def sides(height: int, width: int, short_side: int) -> tuple[int, int]:
    """Height and width of an image that is brought to this short side; rounded as torchvision's Resize does."""
    short = min(height, width)
    return int(short_side * height / short), int(short_side * width / short)


def resized(image: Tensor, height: int, width: int) -> Tensor:
    """`image`, uint8 [C, H, W], brought to uint8 [C, height, width]: bilinear, with antialiasing."""
    # image[None] would not be known as channels last, and its pixels be taken apart and put together again.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    on_cpu = image.device.type == "cpu"  # which alone resizes uint8
    found = F.interpolate(batch if on_cpu else batch.float(), (height, width), mode="bilinear", antialias=True)[0]
    return found if on_cpu else found.round_().to(torch.uint8)
