"""Decoding of images on the device, for hosts with few cores and a fast GPU (`--data.decode-on device`).

A worker process reads a file and its header and computes the crop. The device decodes all JPEG files of a batch at once
(torchvision's `decode_jpeg`: nvJPEG on CUDA), crops, resizes and mirrors. The worker decodes what nvJPEG does not
support (PNG, CMYK, truncated files), as strictly as without this option.
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
from accel_train.data.sources.files.encoded import EncodedImages
from accel_train.data.sources.files.images import ImageError, LazyImage, apply_orientation, bytes_to_tensor, decode
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.transforms.image import drawn_boxes, drawn_flips, resize_default, resized, sides
from accel_train.errors import UserError

DEVICES = ("cuda", "cpu")  # the CPU is for tests and comparisons


class CropSpec(NamedTuple):
    """How to crop, resize and flip one image."""

    jpeg: bool  # its bytes are a JPEG file; else pixels, uint8 [C, height, width]
    height: int
    width: int
    box: tuple[int, ...]  # top, left, height, width of the crop
    resized: tuple[int, int]  # height and width of the resized crop; its centre becomes the model's input
    flips: tuple[int, ...]  # dimensions of [C, H, W] along which the crop is flipped
    orientation: int = 1  # the file's EXIF orientation; the box refers to the image after applying it


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded images of a batch. It is not a tensor, so Accelerate leaves it on the host, as nvJPEG needs."""

    bytes: Tensor
    """uint8 [n]: all images in one tensor, because each tensor sent by a worker needs a file descriptor."""
    ends: list[int]
    """Where each image ends in `bytes`."""
    cuts: list[CropSpec]


class JpegReader:
    """Used by workers in place of an ImageTransform: reads files without decoding JPEG."""

    def __init__(self, augment: Augment, size: int, *, training: bool) -> None:
        self.augment, self.size, self.training = augment, size, training
        self.short_side = augment.resize or resize_default(size)

    def __call__(self, images: Sequence[LazyImage], keys: Tensor) -> EncodedBatch:
        """`keys`: int64 [b]. Draws the same random parameters as an ImageTransform. Raises UserError."""
        flips = drawn_flips(keys, self.augment, training=self.training)
        if self.training and self.augment.crop == "resized":
            boxes = drawn_boxes(images, keys, self.augment)
            targets = [(self.size, self.size)] * len(images)
        else:
            boxes = [[0, 0, image.height, image.width] for image in images]
            targets = [sides(image.height, image.width, self.short_side) for image in images]
        pieces: list[Tensor] = []
        cuts: list[CropSpec] = []
        for image, box, target, dimensions in zip(images, boxes, targets, flips, strict=True):
            file = image.whole_jpeg()
            pieces.append(image.pixels().flatten() if file is None else bytes_to_tensor(file))
            turn = 1 if file is None else image.orientation  # pixels() has already applied the orientation
            cuts.append(CropSpec(file is not None, image.height, image.width, tuple(box), target, dimensions, turn))
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
        return EncodedBatch(torch.cat(pieces), ends, cuts)


class DeviceDecoder:
    """Decodes, on the device, the images that a JpegReader has read."""

    def __init__(self, source: Source, augment: Augment, *, size: int, channels: int, device: torch.device) -> None:
        """`size`: of the model's input, in pixels; `channels`: 3 (RGB) or 1 (grey).

        Raises UserError if torchvision has no decoder: it is to leave it for TorchCodec some day.
        """
        try:
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError as error:
            raise UserError("--data.decode-on device: this torchvision cannot decode JPEG; use host.") from error
        mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
        self.decode_jpeg = partial(decode_jpeg, mode=mode, device=device)
        self.source = source
        self.size, self.channels, self.device = size, channels, device
        self.interpolation = augment.interpolation
        # torchvision's CUDA decoder writes on its own stream, into memory that kernels queued on the current stream may
        # still be reading (https://github.com/pytorch/vision/pull/9606). This is safe if only decoding uses the memory
        # of the current stream, and if that stream's kernels have ended before each call.
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: EncodedBatch, ids: Tensor) -> Tensor:
        """Images uint8 [b, C, size, size] on the device, channels last in memory. `ids`: int64 [b], of the samples.

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
        jpegs = [index for index, cut in enumerate(batch.cuts) if cut.jpeg]
        turns = [batch.cuts[index].orientation for index in jpegs]
        decoded = dict(zip(jpegs, self._decoded([pieces[index] for index in jpegs], turns, ids, jpegs), strict=True))
        images = torch.empty((len(pieces), self.size, self.size, self.channels), dtype=torch.uint8, device=self.device)
        for index, (piece, cut) in enumerate(zip(pieces, batch.cuts, strict=True)):
            pixels = decoded[index] if cut.jpeg else piece.view(self.channels, cut.height, cut.width)
            images[index] = self._cut(pixels.to(self.device), cut).permute(1, 2, 0)
        return images.permute(0, 3, 1, 2)

    def _decoded(self, files: list[Tensor], turns: list[int], ids: Tensor, indices: list[int]) -> list[Tensor]:
        """Pixels of JPEG files with EXIF orientations `turns`, at `indices` of the batch with sample numbers `ids`."""
        if not files:
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision warns of a future change of its decoders
            try:
                images: list[Tensor] = self.decode_jpeg(files)
            except RuntimeError:  # it does not name the file: decode each on the host, which decides
                return [self._on_host(file, ids, index) for file, index in zip(files, indices, strict=True)]
        return [apply_orientation(pixels, turn) for pixels, turn in zip(images, turns, strict=True)]

    def _on_host(self, file: Tensor, ids: Tensor, index: int) -> Tensor:
        held, held_ids = unwrap_subset(self.source)
        assert isinstance(held, EncodedImages)
        try:
            return decode(file.numpy().tobytes(), self.channels, held.max_pixels)
        except ImageError as error:
            id = int(ids[index])
            raise held.unreadable(id if held_ids is None else int(held_ids[id]), error) from error

    def _cut(self, pixels: Tensor, cut: CropSpec) -> Tensor:
        top, left, height, width = cut.box
        image = pixels[:, top : top + height, left : left + width]
        if image.shape[1:] != cut.resized:
            image = resized(image, *cut.resized, self.interpolation)
        top, left = (round((side - self.size) / 2) for side in cut.resized)  # as torchvision's CenterCrop
        image = image[:, top : top + self.size, left : left + self.size]
        return image.flip(cut.flips) if cut.flips else image


def check_device_decoding(source: Source, augment: Augment, device: torch.device, *, training: bool) -> None:
    """Raise UserError if the images of `source` cannot be decoded on the device."""
    option = "--data.decode-on device"
    if not isinstance(unwrap_subset(source)[0], EncodedImages):
        raise UserError(f"{option}: the images of this dataset are not files; use host.")
    if training and (augment.policy != "none" or augment.crop == "random"):
        raise UserError(
            f"{option}: augment.policy and crop=random transform decoded images on the host; use host, or crop=resized "
            "or center without a policy."
        )
    if device.type not in DEVICES:
        raise UserError(f"{option}: found a device of type {device.type}, but only CUDA decodes JPEG; use host.")
