"""Transforms of a whole batch on the device: resize, crop, flip, normalise, erase, mix.

Each sample has its own random parameters, drawn on the host from its own key (see keyed.py): a pure function of (seed,
epoch, sample), whichever process, accumulation step or restart computes it. torchvision's transforms would give all
samples of a batch the same crop and the same flip. The loaders know the keys before the device does; they draw for many
batches at once and send one small tensor. On a GPU the same numbers would take about 200 kernels of a few microseconds
each in every update.

Mixup and cutmix mix neighbours, the samples at positions 2k and 2k+1 of an update. The order is random, and
so are the pairs; a slice of even size has both samples of each pair for any number of processes and accumulation steps.

The update of a small network on a GPU takes as long as launching its kernels. So some steps are written twice, in the
fastest way for a CPU and with fewer kernels for a GPU; both give the same bits.
"""

from __future__ import annotations

import math
from enum import IntEnum, auto

import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Augment
from accel_train.keyed import GOLDEN, scramble, shift, signed, uniforms


class Stream(IntEnum):
    """Number of each draw in a sample's sequence. They stay as they are: others would change the augmentation."""

    TOP = auto()
    LEFT = auto()
    FLIP = auto()
    ERASE = auto()
    ERASE_AREA = auto()
    ERASE_RATIO = auto()
    ERASE_TOP = auto()
    ERASE_LEFT = auto()
    MIX = auto()
    MIX_KIND = auto()
    MIX_SHARE = auto()
    MIX_TOP = auto()
    MIX_LEFT = auto()
    RESIZED_TOP = auto()
    RESIZED_LEFT = auto()
    VERTICAL_FLIP = auto()
    INTERPOLATION = 21
    ERASE_NOISE = 23
    RESIZED = 1000  # and following: area and ratio of each try


class Column(IntEnum):
    """The column of each parameter in a sample's row. All are int32, so that one copy sends them all to the device."""

    TOP = 0  # of the crop; plus the number of possible windows if the image is flipped vertically
    LEFT = 1  # of the crop; plus the number of possible windows if the image is flipped horizontally
    FIRST = 2  # 4 columns: first row and column of the erased box, then of the pasted box
    LAST = 6  # 4 columns: last row and column, which are inside the box; -1 if the box is empty
    CUT = 10  # 1 for CutMix, 0 for mixup
    SHARE = 11  # of the sample itself in the mixture: the bits of a float32
    REST = 12  # 1 - share, the neighbour's: the bits of a float32


COLUMNS = Column.REST + 1


class AugmentParameters:
    """Draws the parameters that `BatchTransform` needs for each training sample. All its tensors are on the CPU."""

    def __init__(self, augment: Augment, size: int, *, per_image: bool, virtual_batch: int = 2) -> None:
        """`size`: of the model's input, in pixels; `per_image`: workers have already cropped and flipped the images;
        `virtual_batch`: samples that are always computed together, in the order's places."""
        self.augment, self.size = augment, size
        self.crops = augment.crop == "random" and not per_image
        self.flips = (augment.flip > 0 or augment.vertical_flip > 0) and not per_image
        self.mixing = None
        if augment.mixes:
            self.mixing = Mixing(augment, size, virtual_batch)
        self.pad = augment.pad if self.crops else 0
        self.reflects = augment.pad_mode == "reflect"  # what is padded is the reflected image; else it is black
        self.windows = (augment.resize or size) + 2 * self.pad - size + 1  # possible positions in each direction

    @property
    def any(self) -> bool:
        """Whether the augmentation has any random part."""
        return self.crops or self.flips or self.mixing is not None or self.augment.erase > 0

    def __call__(self, keys: Tensor, weights: Tensor) -> Tensor:
        """The parameters, int32 [b, columns], of samples with these keys (int64 [b]) and weights (float32 [b]).

        All on the CPU. With mixing, the samples are whole pairs of neighbours, or (`mix_mode` batch) virtual batches.
        """
        parameters = torch.zeros((len(keys), COLUMNS), dtype=torch.int32)
        if self.crops or self.flips:
            self._draw_windows(parameters, keys)
        if self.augment.erase:
            self._draw_erased(parameters, keys)
        if self.mixing is not None:
            self.mixing(parameters, keys, weights)
        return parameters

    def _draw_windows(self, parameters: Tensor, keys: Tensor) -> None:
        """Crops and flips."""
        draws = uniforms(keys, (Stream.VERTICAL_FLIP, Stream.FLIP, Stream.TOP, Stream.LEFT))
        if self.crops:
            corners = (draws[2:] * self.windows).int()
        else:
            corners = torch.full((2, len(keys)), (self.windows - 1) // 2, dtype=torch.int32)
        if self.flips:
            for axis, probability in enumerate((self.augment.vertical_flip, self.augment.flip)):
                corners[axis].add_(draws[axis] < probability, alpha=self.windows)
        parameters[:, Column.TOP : Column.LEFT + 1] = corners.T

    def _draw_erased(self, parameters: Tensor, keys: Tensor) -> None:
        """Random erasing (Zhong et al., 2020, https://arxiv.org/abs/1708.04896)."""
        streams = (Stream.ERASE, Stream.ERASE_AREA, Stream.ERASE_RATIO, Stream.ERASE_TOP, Stream.ERASE_LEFT)
        draws = uniforms(keys, streams)
        erased = draws[0] < self.augment.erase
        area = 0.02 + draws[1] * (0.33 - 0.02)
        ratio = torch.exp((draws[2] * 2 - 1) * math.log(1 / 0.3))
        height = (torch.sqrt(area * ratio) * self.size).round().clamp(1, self.size)
        width = (torch.sqrt(area / ratio) * self.size).round().clamp(1, self.size)
        top = (draws[3] * (self.size - height + 1)).floor()
        left = (draws[4] * (self.size - width + 1)).floor()
        for axis, (first, length) in enumerate(((top, height), (left, width))):
            parameters[:, Column.FIRST + axis] = first.int()
            parameters[:, Column.LAST + axis] = torch.where(erased, first + length - 1, -1).int()


def transforms_each_image(one_size: bool, augment: Augment, *, training: bool) -> bool:
    """Whether images must be transformed one by one (image_transform.py) before they form a batch.

    `one_size`: whether the source has them as tensors of one size.
    """
    return not one_size or (training and augment.each_image)


def crop_fraction(size: int, short_side: int) -> float:
    """The shortest augment.crop_fraction with which a crop of `size` pixels is from images with this short side."""
    for digits in range(2, 16):
        fraction = round(size / short_side, digits)
        if fraction > 0 and math.floor(size / fraction) == short_side:
            return fraction
    return math.nextafter(size / short_side, 0)


def resize_default(size: int) -> int:
    """The short side before cropping an input of `size` pixels: 256 for 224, as is usual for ImageNet."""
    return round(size / 0.875)


def over_pixels(values: Tensor) -> Tensor:
    """One value for each image of a batch [b, C, H, W], from `values` [b]."""
    return values[:, None, None, None]


def box_masks(parameters: Tensor, first: int, last: int, steps: Tensor, count: int = 1) -> Tensor:
    """Masks, bool [b, count, size, size], of boxes whose first rows and columns are in the columns `first` and after
    it, two of each box, and whose last ones in `last`. `steps`: int32 [size], from 0 on."""
    low, high = (parameters[:, column : column + 2 * count, None] for column in (first, last))
    inside = steps.clamp(low, high) == steps  # [b, 2 count, size]; an empty box ends at -1, which no step equals
    return inside[:, 0::2, :, None] & inside[:, 1::2, None, :]


# The random parameters of Mixup and CutMix: which samples are mixed, how, and with which share.
#
# Mixup: Zhang et al., 2018, https://arxiv.org/abs/1710.09412; CutMix: Yun et al., 2019,
# https://arxiv.org/abs/1905.04899. The choices are those of timm's Mixup (mode, switching); its "batch" is the virtual
# batch here, which is the same on any number of processes. A sample's partner is its neighbour, not the sample at the
# other end of a batch.


SWITCH_PROBABILITY = 0.5  # of CutMix, not mixup, if both are on: timm's default
DRAWS = (Stream.MIX, Stream.MIX_KIND, Stream.MIX_SHARE, Stream.MIX_TOP, Stream.MIX_LEFT)
"""Of a group: whether to mix, which of the two, the share, and the place of the box."""


class Mixing:
    """Draws how samples are mixed."""

    def __init__(self, augment: Augment, size: int, virtual_batch: int) -> None:
        """`size`: of the model's input, in pixels; `virtual_batch`: samples that are always computed together."""
        self.augment, self.size = augment, size
        self.group = {"batch": virtual_batch, "pair": 2, "elem": 1}[augment.mix_mode]
        """Samples that share the numbers which are drawn."""
        self.cuts = augment.cuts
        # Tables to convert a uniform number to Beta(alpha, alpha), because torch cannot sample it from a key.
        self.mixup_quantiles = beta_quantiles(augment.mixup)
        self.cutmix_quantiles = beta_quantiles(augment.cutmix)

    def __call__(self, parameters: Tensor, keys: Tensor, weights: Tensor) -> None:
        """Fill the columns of `parameters`, int32 [b, columns]. `keys`: int64 [b], of which the first one of each group
        is that of all its samples; `weights`: float32 [b], 0 for padding."""
        draws = uniforms(keys[:: self.group], DRAWS)
        both = self.augment.mixup > 0 and self.cuts
        cuts = (draws[1] < SWITCH_PROBABILITY) if both else torch.full_like(draws[1], self.cuts).bool()
        cutmix_share, mixup_share = (
            _interpolate(quantiles, draws[2]) for quantiles in (self.cutmix_quantiles, self.mixup_quantiles)
        )
        share = torch.where(cuts, cutmix_share, mixup_share)
        rows, columns = self._sides(draws, share)
        area = (rows[1] - rows[0]) * (columns[1] - columns[0])
        share = torch.where(cuts, 1 - area / self.size**2, share)
        mixed = draws[0] < self.augment.mix_probability

        def of_samples(values: Tensor) -> Tensor:
            return values.repeat_interleave(self.group)

        # The neighbour of an epoch's last sample may be padding: then the sample is not mixed.
        pairs = weights.view(-1, 2)
        real = ((pairs[:, 0] > 0) & (pairs[:, 1] > 0)).repeat_interleave(2)
        mixed = of_samples(mixed) & real
        share = torch.where(mixed, of_samples(share), 1.0)
        parameters[:, Column.CUT] = of_samples(cuts).int()
        parameters[:, Column.SHARE] = share.view(torch.int32)
        parameters[:, Column.REST] = (1 - share).view(torch.int32)
        for axis, (first, end) in enumerate((rows, columns)):
            last = torch.where(mixed & of_samples(end > first), of_samples(end - 1), -1)
            parameters[:, Column.FIRST + 2 + axis] = of_samples(first).int()
            parameters[:, Column.LAST + 2 + axis] = last.int()

    def _sides(self, draws: Tensor, share: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The first row and the one after the last, and so the columns, of a box of the image's shape around a random
        pixel, clipped at the image's edge. The side is rounded down, as in timm's rand_bbox and the paper's own code
        (the paper itself does not round): the recipes with CutMix come from there."""
        side = (torch.sqrt(1 - share) * self.size).floor()
        firsts = [(draws[3 + axis] * self.size).floor() - (side / 2).floor() for axis in (0, 1)]
        return [(first.clamp(0, self.size), (first + side).clamp(0, self.size)) for first in firsts]


def beta_quantiles(alpha: float, count: int = 4097) -> Tensor:
    """Quantiles of Beta(alpha, alpha) at `count` evenly spaced probabilities from 0 to 1; float32 [count].

    alpha = 0 means "no mixing": all ones.
    """
    if alpha == 0:
        return torch.ones(count)
    from scipy.special import betaincinv  # scikit-learn depends on scipy

    return torch.from_numpy(betaincinv(alpha, alpha, torch.linspace(0, 1, count, dtype=torch.float64).numpy())).float()


def _interpolate(quantiles: Tensor, probabilities: Tensor) -> Tensor:
    """The quantiles at `probabilities` (in [0, 1)), by linear interpolation in the table."""
    positions = probabilities * (len(quantiles) - 1)
    below = positions.long()
    return torch.lerp(quantiles[below], quantiles[below + 1], positions - below)


# The transform, which uses the parameters on the device.


class BatchTransform:
    """Computes the model's input from a batch of uint8 images, and targets from labels."""

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
        full_scale: int = 255,
        virtual_batch: int = 2,
    ) -> None:
        """`mean` and `std`: of each channel; they count the pixel value `full_scale` as 1. `size` (height and width, in
        pixels) and `memory_format`: of the model's input. `per_image`: workers have already resized, cropped and
        flipped the images. `virtual_batch`: see AugmentParameters."""
        self.augment = augment
        self.size = size
        self.num_classes = num_classes
        self.mean = mean
        self.training = training
        self.per_image = per_image
        self.memory_format = memory_format
        parameters = AugmentParameters(augment, size, per_image=per_image, virtual_batch=virtual_batch)
        self.draw_parameters = parameters if training and parameters.any else None
        """Draws the "parameters" that each batch must have. None: the transform is not random."""
        # A pixel becomes pixel / scale + shift. Both have the input's layout, so that the arithmetic runs along its
        # memory: [C, 1, 1], or one row, [size, C].
        means, stds = torch.tensor(mean, device=device), torch.tensor(std, device=device)
        self.scale, self.shift = (
            values.view(-1, 1, 1) if memory_format == torch.contiguous_format else values.repeat(size, 1)
            for values in (stds * full_scale, -means / stds)
        )
        self.mixes, self.cuts = augment.mixes, augment.cuts
        self.steps = torch.arange(size, dtype=torch.int32).to(device)
        self.classes = torch.arange(num_classes).to(device)
        self.interpolation = augment.interpolation_of(training=training)
        self.clamps = self.interpolation == "bicubic" and full_scale == 255  # it overshoots
        self.planes = torch.arange(len(mean))[:, None, None].to(device)
        self.erasing = None
        if augment.erase > 0 and self.draw_parameters is not None:
            self.erasing = Erasing(augment.erase_mode, device)
        if self.draw_parameters is not None:
            # The image's rows or columns in each window, int64 [windows, size]; then those of flipped windows.
            indices = window_indices(self.draw_parameters)
            self.places = torch.cat([indices, indices.flip(1)]).to(device)

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`batch`: images uint8 or float32 [b, C, H, W], labels int64 [b] or bool [b, classes] and, unless
        `draw_parameters` is None, its result as "parameters", int32 [b, columns]; to erase with colours, also "keys".

        Returns the input, float32 [b, C, size, size] in `memory_format`, and the targets: labels int64 [b] or, if
        samples are mixed or have several labels, probabilities float32 [b, classes]. In evaluation the targets are the
        labels as they are.
        """
        images, labels = batch["images"], batch["labels"]
        resize = self.augment.resize or self.size
        if not self.per_image and images.shape[-1] != resize:
            images = self._resized(images, resize)
        if self.draw_parameters is None:
            return self._normalise(self._center(images)), self._targets(labels)
        parameters = batch["parameters"]
        images = self._crop_and_flip(images, parameters)
        images = self._normalise(images)
        masks = self._masks(parameters)
        if self.erasing is not None and masks is not None:
            self.erasing(images, batch, masks[:, :1])
        if self.mixes:
            pasted = masks[:, -1:] if masks is not None and self.cuts else None
            return self._mix(images, labels, parameters, pasted)
        return images, self._targets(labels)

    def _resized(self, images: Tensor, side: int) -> Tensor:
        images = F.interpolate(images.float(), (side, side), mode=self.interpolation, antialias=True)
        return images.clamp_(0, 255) if self.clamps else images

    def _targets(self, labels: Tensor) -> Tensor:
        return labels.float() if self.training and labels.ndim == 2 else labels

    def _center(self, images: Tensor) -> Tensor:
        top, left = ((side - self.size) // 2 for side in images.shape[2:])
        return images[:, :, top : top + self.size, left : left + self.size]

    def _crop_and_flip(self, images: Tensor, parameters: Tensor) -> Tensor:
        """One window of size x size pixels of each image, random or central, and flipped at random."""
        draw = self.draw_parameters
        if draw is None or not (draw.crops or draw.flips):
            return self._center(images)
        tops, lefts = parameters[:, Column.TOP], parameters[:, Column.LEFT]
        if images.device.type == "cpu":
            flips = (tops >= draw.windows) if self.augment.vertical_flip else None, lefts >= draw.windows
            tops, lefts = tops % draw.windows, lefts % draw.windows
            return _windows(images, draw, tops, lefts, *flips)

        # A GPU gains nothing from copying contiguous runs: index each pixel, with 5 kernels instead of about 20.
        if draw.pad and not draw.reflects:
            images = F.pad(images, (draw.pad,) * 4)
        samples = torch.arange(len(images), device=images.device)
        rows, columns = self.places.index_select(0, tops), self.places.index_select(0, lefts)
        if self.memory_format == torch.channels_last:
            windows = images.permute(0, 2, 3, 1)[samples[:, None, None], rows[:, :, None], columns[:, None, :]]
            return windows.permute(0, 3, 1, 2)
        return images[samples[:, None, None, None], self.planes, rows[:, None, :, None], columns[:, None, None, :]]

    def _normalise(self, images: Tensor) -> Tensor:
        """Normalised images: a new tensor, float32 in the input's memory format."""
        if images.device.type == "cuda":  # its kernel reads uint8 directly
            normalised = torch.empty(images.shape, device=images.device, memory_format=self.memory_format)
        else:
            images = normalised = images.to(torch.float32, memory_format=self.memory_format, copy=True)
        if self.memory_format != torch.contiguous_format:
            images, out = images.permute(0, 2, 3, 1), normalised.permute(0, 2, 3, 1)
        else:
            out = normalised
        # A quotient and a sum are each rounded on every device; a product and a sum might be fused.
        torch.addcdiv(self.shift, images, self.scale, out=out)
        return normalised

    def _masks(self, parameters: Tensor) -> Tensor | None:
        """Masks of the erased box, then of the pasted one, bool [b, boxes, size, size], if the recipe has them: made
        together, which saves a GPU three kernels."""
        first, end = (0 if self.erasing is not None else 2), (4 if self.cuts else 2)  # columns
        if first == end:
            return None
        return box_masks(parameters, Column.FIRST + first, Column.LAST + first, self.steps, (end - first) // 2)

    def _mix(self, images: Tensor, labels: Tensor, parameters: Tensor, pasted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mixup and CutMix of neighbours. `pasted`: masks of CutMix's boxes, bool [b, 1, size, size], or None."""
        share, rest = (parameters[:, column].view(torch.float32) for column in (Column.SHARE, Column.REST))
        partner = _swapped(images).contiguous(memory_format=self.memory_format)
        cut = images if pasted is None else torch.where(pasted, partner, images)
        if self.augment.mixup > 0:
            blended = images.mul_(over_pixels(share)).add_(partner.mul_(over_pixels(rest)))
            is_cut = None if pasted is None else parameters[:, Column.CUT] > 0
            images = blended if is_cut is None else torch.where(over_pixels(is_cut), cut, blended)
        else:
            images = cut
        images = images.contiguous(memory_format=self.memory_format)
        own = labels if labels.ndim == 2 else labels[:, None] == self.classes
        return images, own * share[:, None] + _swapped(own) * rest[:, None]


def window_indices(draw: AugmentParameters) -> Tensor:
    """Indices along one side of the image of the pixels in each window, int64 [windows, size].

    If it is reflected they are of the image itself, else of the padded image.
    """
    indices = torch.arange(draw.windows)[:, None] + torch.arange(draw.size)
    if draw.reflects:
        last = draw.windows + draw.size - 2 * draw.pad - 2
        indices = last - (last - (indices - draw.pad).abs()).abs()
    return indices


def _windows(
    images: Tensor, draw: AugmentParameters, tops: Tensor, lefts: Tensor, upended: Tensor | None, mirrored: Tensor
) -> Tensor:
    """The window of size x size pixels of each image that begins at `tops` and `lefts` (int32 [b]), on the CPU.

    Images are first padded, black or reflected at the edge. Windows are flipped left to right where `mirrored` (bool
    [b]) is true, and upside down where `upended` is. A row of a window is contiguous in memory, so one index_select
    fetches all rows: from the images, or from flipped copies that follow the images in the same tensor.
    """
    pad, size = draw.pad, draw.size
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    planes = images.permute(0, 2, 3, 1)[:, None] if channels_last else images[..., None]
    to_flip = planes.index_select(0, mirrored.nonzero()[:, 0])
    number = torch.where(mirrored, len(planes) - 1 + mirrored.cumsum(0), torch.arange(len(planes)))
    _, count, height, width, values = planes.shape
    height, width = height + 2 * pad, width + 2 * pad
    padded = planes.new_zeros((len(planes) + len(to_flip), count, height, width, values))
    inner = padded[:, :, pad : height - pad, pad : width - pad]
    inner[: len(planes)], inner[len(planes) :] = planes, to_flip.flip(3)
    if draw.reflects and pad:
        _reflect(padded, pad, 2)
        _reflect(padded, pad, 3)

    flat, length = padded.view(-1), size * values
    runs = flat.as_strided((len(flat) - length + 1, length), (1, 1))
    lefts = torch.where(mirrored, width - size - lefts, lefts)
    # The index in `flat` of each window's first value.
    first = ((number * (count * height) + tops) * width + lefts) * values
    rows = torch.arange(count * height).view(count, height)[:, :size] * (width * values)
    if upended is not None:
        rows = torch.where(upended[:, None, None], rows.flip(1), rows)
    windows = runs.index_select(0, (first[:, None, None] + rows).view(-1)).view(len(planes), count, size, size, values)
    return windows[:, 0].permute(0, 3, 1, 2) if channels_last else windows[..., 0]


def _reflect(padded: Tensor, pad: int, dim: int) -> None:
    """Fill the outer `pad` pixels along `dim` with the reflected inner ones; the edge itself is not repeated."""
    inner = padded.shape[dim] - 2 * pad
    padded.narrow(dim, 0, pad).copy_(padded.narrow(dim, pad + 1, pad).flip(dim))
    padded.narrow(dim, pad + inner, pad).copy_(padded.narrow(dim, inner - 1, pad).flip(dim))


def _swapped(values: Tensor) -> Tensor:
    """`values` with each pair of neighbours exchanged: [1, 0, 3, 2, …]."""
    return values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)


# What erased boxes are filled with: --augment.erase-mode, as timm's random erasing names the modes.
#
# Random colours are normal numbers, as in timm, in the units of normalised pixels. Each follows from the sample's key
# and its own place, and from a table, so that it has the same bits on every device and in every batch.


BITS = 16  # of a normal number
NOISE_CHUNK = 1 << 21  # pixels that are drawn at a time


class Erasing:
    """Erases the box of each image of a batch."""

    def __init__(self, mode: str, device: torch.device) -> None:
        """`mode`: augment.erase-mode."""
        self.mode = mode
        if self.mode != "const":
            middles = (torch.arange(1 << BITS, dtype=torch.float64) + 0.5) / (1 << BITS)
            self.normal = torch.special.ndtri(middles).float().to(device)

    def __call__(self, images: Tensor, batch: dict[str, Tensor], masks: Tensor) -> None:
        """Erase in `images`, normalised float32 [b, C, size, size], in place. `batch`: "parameters" and, unless the
        mode is const, "keys", int64 [b]. `masks`: of the boxes, bool [b, 1, size, size]."""
        if self.mode == "const":
            images.masked_fill_(masks, 0.0)  # the mean colour
            return
        which = torch.arange(len(images), device=images.device)
        if images.device.type == "cpu":
            which = (batch["parameters"][:, Column.LAST] >= 0).nonzero()[:, 0]  # the others would not change
        step = max(1, NOISE_CHUNK // images[0].numel())
        for start in range(0, len(which), step):
            rows = which[start : start + step]
            images[rows] = torch.where(masks[rows], self._noise(batch["keys"][rows], images), images[rows])

    def _noise(self, keys: Tensor, images: Tensor) -> Tensor:
        """Normal numbers for each sample's box, float32 [b, C, size, size], or [b, C, 1, 1] of its colour."""
        shape = images.shape[1:] if self.mode == "pixel" else (images.shape[1], 1, 1)
        count = shape[0] * shape[1] * shape[2]
        own = scramble(keys + signed((Stream.ERASE_NOISE + 1) * GOLDEN))
        places = torch.arange(1, 1 + count, device=keys.device)
        words = scramble(own[:, None] + places * signed(GOLDEN))
        noise: Tensor = self.normal[shift(words, 64 - BITS)].view(-1, *shape)
        return noise
