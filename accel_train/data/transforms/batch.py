"""What is done to a whole batch at once, on the device: resize, crop, flip, normalise, erase, mix.

What is random about each sample comes with the batch (see parameters.py): a pure function of (seed, epoch, sample),
whichever process, accumulation step or restart computes it. torchvision's transforms would give all samples of a
batch the same crop and the same flip.

Mixup and cutmix mix neighbours, the samples at positions 2k and 2k+1 of an update's window. The order is random, so
are the pairs, and a slice of even size holds both of each, whatever the number of processes and of accumulation steps.

A small net's update on a GPU takes as long as its kernels take to be started. So what a CPU does the fastest way is
in places written another way for a GPU, with fewer kernels; the bits are the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.data.transforms.parameters import AugmentParameters, Column


class BatchTransform:
    """Turns a batch of uint8 images into the model's input, and labels into targets."""

    def __init__(
        self,
        augment: Augment,
        *,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_classes: int,
        training: bool,
        per_image: bool,
        device: torch.device,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """`mean` and `std`: of each channel, in 0..1. `size` (height and width, in pixels) and `memory_format`: of the
        model's input. `per_image`: transform.py has resized, cropped and flipped already."""
        self.augment = augment
        self.size = size
        self.num_classes = num_classes
        self.training = training
        self.per_image = per_image
        self.memory_format = memory_format
        draws = AugmentParameters(augment, size, per_image=per_image)
        self.draws = draws if training and draws.any else None
        """Draws what batches must bring along as "parameters"; None: nothing is random about them."""
        # A pixel becomes pixel / scale + shift. Both lie in the input's layout, so that the arithmetic runs along its
        # memory: [C, 1, 1], or a row of it, [size, C].
        means, stds = torch.tensor(mean, device=device), torch.tensor(std, device=device)
        self.scale, self.shift = (
            values.view(-1, 1, 1) if memory_format == torch.contiguous_format else values.repeat(size, 1)
            for values in (stds * 255, -means / stds)
        )
        self.steps = torch.arange(size, dtype=torch.int32).to(device)
        self.classes = torch.arange(num_classes).to(device)
        self.planes = torch.arange(len(mean))[:, None, None].to(device)
        if self.draws is not None:
            # The rows and columns of the image that each window takes, int64 [windows, size]; mirrored ones follow.
            taken = window_places(self.draws, reflects=augment.pad_mode == "reflect")
            self.rows, self.columns = taken.to(device), torch.cat([taken, taken.flip(1)]).to(device)

    @property
    def mixes(self) -> bool:
        return self.draws is not None and self.draws.mixes

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`batch`: images uint8 [b, C, H, W], labels int64 [b]; unless `draws` is None what it draws, int32
        [b, columns], as "parameters".

        Returns the input, float32 [b, C, size, size] in `memory_format`, and the targets: labels int64 [b] or,
        mixed, shares float32 [b, classes].
        """
        images, labels = batch["images"], batch["labels"]
        resize = self.augment.resize or self.size
        if not self.per_image and images.shape[-1] != resize:
            images = F.interpolate(images.float(), (resize, resize), mode="bilinear", antialias=True)
        if self.draws is None:
            return self._normalise(self._center(images)), labels
        parameters = batch["parameters"]
        images = self._normalise(self._crop_and_flip(images, parameters))
        erases, cuts = self.augment.erase > 0, self.augment.cutmix > 0
        boxes = self._boxes(parameters, 0 if erases else 1, 2 if cuts else 1) if erases or cuts else None
        if boxes is not None and erases:
            images.masked_fill_(boxes[:, :1], 0.0)  # in the mean's colour
        if self.mixes:
            return self._mix(images, labels, parameters, boxes[:, -1:] if boxes is not None and cuts else None)
        return images, labels

    def _center(self, images: Tensor) -> Tensor:
        top, left = ((side - self.size) // 2 for side in images.shape[2:])
        return images[:, :, top : top + self.size, left : left + self.size]

    def _crop_and_flip(self, images: Tensor, parameters: Tensor) -> Tensor:
        """One window of size x size of each image, at random or in the middle, by chance mirrored."""
        draws = self.draws
        if draws is None or not (draws.crops or draws.flips):
            return self._center(images)
        tops, lefts = parameters[:, Column.TOP], parameters[:, Column.LEFT]
        reflects = self.augment.pad_mode == "reflect"
        if images.device.type == "cpu":
            mirrored = lefts >= draws.places
            return _windows(images, draws.pad, tops, lefts % draws.places, mirrored, self.size, reflects=reflects)

        # Where runs of memory are worth nothing, each pixel is fetched from its own place: five kernels in place of
        # some twenty.
        if draws.pad and not reflects:
            images = F.pad(images, (draws.pad,) * 4)
        samples = torch.arange(len(images), device=images.device)
        rows, columns = self.rows.index_select(0, tops), self.columns.index_select(0, lefts)
        if self.memory_format == torch.channels_last:
            windows = images.permute(0, 2, 3, 1)[samples[:, None, None], rows[:, :, None], columns[:, None, :]]
            return windows.permute(0, 3, 1, 2)
        return images[samples[:, None, None, None], self.planes, rows[:, None, :, None], columns[:, None, None, :]]

    def _normalise(self, images: Tensor) -> Tensor:
        """A new tensor, float32 in the input's memory format."""
        if images.device.type == "cuda":  # its kernel reads uint8 as they are
            found = torch.empty(images.shape, device=images.device, memory_format=self.memory_format)
        else:
            images = found = images.to(torch.float32, memory_format=self.memory_format, copy=True)
        if self.memory_format != torch.contiguous_format:
            images, out = images.permute(0, 2, 3, 1), found.permute(0, 2, 3, 1)
        else:
            out = found
        # A quotient and a sum, each rounded on every device: a product before the sum might not be.
        torch.addcdiv(self.shift, images, self.scale, out=out)
        return found

    def _boxes(self, parameters: Tensor, start: int, end: int) -> Tensor:
        """Masks, bool [b, end - start, size, size], of boxes number `start` to `end` (0: erased, 1: pasted)."""
        first, last = (
            parameters[:, at + 2 * start : at + 2 * end, None] for at in (int(Column.FIRST), int(Column.LAST))
        )
        inside = self.steps.clamp(first, last) == self.steps  # a box that is empty ends at -1, where no step is
        return inside[:, 0::2, :, None] & inside[:, 1::2, None, :]

    def _mix(self, images: Tensor, labels: Tensor, parameters: Tensor, pasted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mixup and CutMix of neighbours; `pasted`: CutMix's boxes, bool [b, 1, size, size], if there are any."""
        share, rest = (parameters[:, at].view(torch.float32) for at in (Column.SHARE, Column.REST))
        partner = _swapped(images).contiguous(memory_format=self.memory_format)
        cut = images if pasted is None else torch.where(pasted, partner, images)
        if self.augment.mixup > 0:
            blended = images.mul_(_per_image(share)).add_(partner.mul_(_per_image(rest)))
            is_cut = None if pasted is None else parameters[:, Column.CUT] > 0
            images = blended if is_cut is None else torch.where(_per_image(is_cut), cut, blended)
        else:
            images = cut
        images = images.contiguous(memory_format=self.memory_format)
        own = labels[:, None] == self.classes
        return images, own * share[:, None] + _swapped(own) * rest[:, None]


def window_places(draws: AugmentParameters, *, reflects: bool) -> Tensor:
    """The places along one side of the image (padded, but if it `reflects`) that each window takes; int64 [windows,
    size]."""
    places = torch.arange(draws.places)[:, None] + torch.arange(draws.size)
    if reflects:
        last = draws.places + draws.size - 2 * draws.pad - 2
        places = last - (last - (places - draws.pad).abs()).abs()
    return places


def _windows(
    images: Tensor, pad: int, tops: Tensor, lefts: Tensor, mirrored: Tensor, size: int, *, reflects: bool
) -> Tensor:
    """The window of size x size of each image, with `pad` pixels around it, black or (`reflects`) mirrored at its edge,
    that begins at its `tops` and `lefts` (int32 [b]); left and right are exchanged in it where `mirrored` (bool [b]).

    For images on the CPU. A row of a window is a run of bytes, and so one index_select, which copies runs, fetches all
    of them: from the images or from the mirrored ones, which stand behind them.
    """
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    planes = images.permute(0, 2, 3, 1)[:, None] if channels_last else images[..., None]
    some = planes.index_select(0, mirrored.nonzero()[:, 0])
    number = torch.where(mirrored, len(planes) - 1 + mirrored.cumsum(0), torch.arange(len(planes)))
    _, count, height, width, values = planes.shape
    height, width = height + 2 * pad, width + 2 * pad
    padded = planes.new_zeros((len(planes) + len(some), count, height, width, values))
    inner = padded[:, :, pad : height - pad, pad : width - pad]
    inner[: len(planes)], inner[len(planes) :] = planes, some.flip(3)
    if reflects and pad:
        _reflect(padded, pad, 2)
        _reflect(padded, pad, 3)

    flat, length = padded.view(-1), size * values
    runs = flat.as_strided((len(flat) - length + 1, length), (1, 1))
    lefts = torch.where(mirrored, width - size - lefts, lefts)
    first = ((number * (count * height) + tops) * width + lefts) * values  # of a window's values, in `flat`
    rows = torch.arange(count * height).view(count, height)[:, :size] * (width * values)
    windows = runs.index_select(0, (first[:, None, None] + rows).view(-1)).view(len(planes), count, size, size, values)
    return windows[:, 0].permute(0, 3, 1, 2) if channels_last else windows[..., 0]


def _reflect(padded: Tensor, pad: int, dim: int) -> None:
    """Fill the outer `pad` pixels along `dim` with the next ones inside, mirrored; the edge is not doubled."""
    inner = padded.shape[dim] - 2 * pad
    padded.narrow(dim, 0, pad).copy_(padded.narrow(dim, pad + 1, pad).flip(dim))
    padded.narrow(dim, pad + inner, pad).copy_(padded.narrow(dim, inner - 1, pad).flip(dim))


def _swapped(values: Tensor) -> Tensor:
    """Each pair of neighbours exchanged: [1, 0, 3, 2, …]."""
    return values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]
