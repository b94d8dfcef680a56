"""Images that the device decodes, for hosts with few cores beside a fast GPU (`--data.decode-on device`).

A worker process reads a file, looks at its header and says what is to be cut from it. The device decodes all JPEG of a
batch at once (torchvision's `decode_jpeg`: nvJPEG on CUDA), cuts, resizes and mirrors. Whatever nvJPEG is not meant
for (PNG, CMYK, a file that is cut short) the worker decodes, as strictly as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.sources.encoded import EncodedImages
from accel_train.data.sources.images import ImageError, LazyImage, apply_orientation, bytes_to_tensor, decode
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.transforms.image import drawn_boxes, drawn_flips, resize_default, resized, sides
from accel_train.errors import UserError

DEVICES = ("cuda", "cpu")  # the CPU for whoever wants to see what would be done


class CropSpec(NamedTuple):
    """What is to be made of an image."""

    jpeg: bool  # its bytes are a file; else they are pixels, uint8 [C, height, width]
    height: int
    width: int
    box: tuple[int, ...]  # top, left, height, width: what is taken of it
    resized: tuple[int, int]  # height and width to which that is brought; the middle becomes the model's input
    mirrored: bool
    orientation: int = 1  # EXIF's, of the file: the box is of the image as it is to be seen


@dataclass(frozen=True)
class EncodedBatch:
    """The images of a batch. No tensor: Accelerate leaves it on the host, where nvJPEG wants to find it."""

    bytes: Tensor
    """uint8 [n], of one image behind the other: a tensor for each would need a file descriptor on its way."""
    ends: list[int]
    """Where each one ends in `bytes`."""
    cuts: list[CropSpec]


class JpegReader:
    """What a worker does in place of an ImageTransform."""

    def __init__(self, augment: Augment, size: int, *, training: bool) -> None:
        self.augment, self.size, self.training = augment, size, training
        self.short_side = augment.resize or resize_default(size)

    def __call__(self, images: Sequence[LazyImage], keys: Tensor) -> EncodedBatch:
        """`keys`: int64 [b]. Draws what an ImageTransform would draw. Raises UserError."""
        mirrored = drawn_flips(keys, self.augment, training=self.training)
        if self.training and self.augment.crop == "resized":
            boxes = drawn_boxes(images, keys, self.augment)
            targets = [(self.size, self.size)] * len(images)
        else:
            boxes = [[0, 0, each.height, each.width] for each in images]
            targets = [sides(each.height, each.width, self.short_side) for each in images]
        pieces: list[Tensor] = []
        cuts: list[CropSpec] = []
        for image, box, target, mirror in zip(images, boxes, targets, mirrored, strict=True):
            file = image.whole_jpeg()
            pieces.append(image.pixels().flatten() if file is None else bytes_to_tensor(file))
            turn = 1 if file is None else image.orientation  # pixels are turned already
            cuts.append(CropSpec(file is not None, image.height, image.width, tuple(box), target, mirror, turn))
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
        return EncodedBatch(torch.cat(pieces), ends, cuts)


class DeviceDecoder:
    """What the device does with the images that a JpegReader has read."""

    def __init__(self, source: Source, *, size: int, channels: int, device: torch.device) -> None:
        """`size`: of the model's input, in pixels; `channels`: 3 (RGB) or 1 (grey).

        Raises UserError if torchvision has no decoder: it is to leave it for TorchCodec some day.
        """
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError as error:
            raise UserError("--data.decode-on device: this torchvision decodes no JPEG: leave it host.") from error
        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        self.decode_jpeg = partial(decode_jpeg, mode=mode, device=device)
        self.source = source
        self.size, self.channels, self.device = size, channels, device
        # torchvision's CUDA decoder writes on a stream of its own, into memory that kernels queued on the current
        # stream may still be reading (https://github.com/pytorch/vision/pull/9606). Training's kernels are out of its
        # reach if nothing but decoding uses the current stream's memory, and its own have ended before each call.
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: EncodedBatch, ids: Tensor) -> Tensor:
        """uint8 [b, C, size, size] on the device, in memory channels last. `ids`: int64 [b], the samples' numbers.

        Raises UserError if an image cannot be decoded.
        """
        if self.stream is None:
            return self._images(batch, ids)
        self.stream.synchronize()
        with torch.cuda.stream(self.stream):
            images = self._images(batch, ids)
        here = torch.cuda.current_stream(self.device)
        here.wait_stream(self.stream)
        images.record_stream(here)
        return images

    def _images(self, batch: EncodedBatch, ids: Tensor) -> Tensor:
        pieces = [batch.bytes[start:end] for start, end in pairwise([0, *batch.ends])]
        files = [at for at, cut in enumerate(batch.cuts) if cut.jpeg]
        turns = [batch.cuts[at].orientation for at in files]
        decoded = dict(zip(files, self._decoded([pieces[at] for at in files], turns, ids, files), strict=True))
        images = torch.empty((len(pieces), self.size, self.size, self.channels), dtype=torch.uint8, device=self.device)
        for at, (piece, cut) in enumerate(zip(pieces, batch.cuts, strict=True)):
            pixels = decoded[at] if cut.jpeg else piece.view(self.channels, cut.height, cut.width)
            images[at] = self._cut(pixels.to(self.device), cut).permute(1, 2, 0)
        return images.permute(0, 3, 1, 2)

    def _decoded(self, files: list[Tensor], turns: list[int], ids: Tensor, places: list[int]) -> list[Tensor]:
        if not files:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its decoders' future
            try:
                found: list[Tensor] = self.decode_jpeg(files)
            except RuntimeError:  # it does not say which one: the host's decoders have the last word, one by one
                return [self._on_host(file, ids, place) for file, place in zip(files, places, strict=True)]
        return [apply_orientation(pixels, turn) for pixels, turn in zip(found, turns, strict=True)]

    def _on_host(self, file: Tensor, ids: Tensor, place: int) -> Tensor:
        held, held_ids = unwrap_subset(self.source)
        assert isinstance(held, EncodedImages)
        try:
            return decode(file.numpy().tobytes(), self.channels, held.max_pixels)
        except ImageError as error:
            id = int(ids[place])
            raise held.unreadable(id if held_ids is None else int(held_ids[id]), error) from error

    def _cut(self, pixels: Tensor, cut: CropSpec) -> Tensor:
        top, left, height, width = cut.box
        image = pixels[:, top : top + height, left : left + width]
        if image.shape[1:] != cut.resized:
            image = resized(image, *cut.resized)
        top, left = (round((side - self.size) / 2) for side in cut.resized)  # as torchvision's CenterCrop
        image = image[:, top : top + self.size, left : left + self.size]
        return image.flip(2) if cut.mirrored else image


def check_device_decoding(source: Source, augment: Augment, device: torch.device, *, training: bool) -> None:
    """Raises UserError if the images of `source` cannot be decoded on the device."""
    key = "--data.decode-on device"
    if not isinstance(unwrap_subset(source)[0], EncodedImages):
        raise UserError(f"{key}: the images of this data set are no files: leave it host.")
    if training and (augment.policy != "none" or augment.crop == "random"):
        raise UserError(
            f"{key}: augment.policy and crop=random turn each decoded image on the host: choose host, or crop=resized "
            "or center without a policy."
        )
    if device.type not in DEVICES:
        raise UserError(f"{key}: found {device.type}; only CUDA decodes JPEG: leave it host.")
