"""Layers without a deterministic kernel on CUDA, for --bitwise: adaptive pooling is replaced, others are named.

torch raises at the first backward pass of such a layer (docs.pytorch.org/docs/stable/generated/
torch.use_deterministic_algorithms.html has the list). So a backward pass is tried before the run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.models.trial import different_images, restored


class DeterministicAvgPool2d(nn.AdaptiveAvgPool2d):
    """AdaptiveAvgPool2d: the same values, of kernels whose backward pass is deterministic on CUDA."""

    def forward(self, input: Tensor) -> Tensor:
        """`input`: [b, C, H, W] or [C, H, W]."""
        return _pool(input, self.output_size, lambda values, dim: values.mean(dim))


class DeterministicMaxPool2d(nn.AdaptiveMaxPool2d):
    """AdaptiveMaxPool2d, likewise. Of equal values another one may get the gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """`input`: [b, C, H, W] or [C, H, W]."""
        return _pool(input, self.output_size, lambda values, dim: values.max(dim).values)


REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool2d: DeterministicAvgPool2d,
    nn.AdaptiveMaxPool2d: DeterministicMaxPool2d,
}


def use_deterministic_layers(config: Config, model: nn.Module, channels: int, size: int) -> None:
    """With --bitwise, replace the layers of `model` that have no deterministic kernel on CUDA, in place, and look for
    others with random images [4, channels, size, size].

    `model` is on its device; on a CPU nothing is done, because all its kernels are deterministic. Raises UserError if a
    backward pass has an operator that is not.
    """
    parameter = next(model.parameters())
    device = parameter.device
    if not config.bitwise or device.type != "cuda":
        return
    for module in model.modules():
        replacement = REPLACED.get(type(module))
        if replacement is not None and not getattr(module, "return_indices", False):
            module.__class__ = replacement
    images = different_images(channels, size).to(device, parameter.dtype)
    try:
        with restored(model, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(images)
            output.float().square().sum().backward()
    except Exception as error:  # whatever a model does: only this mistake is looked for
        if found := re.search(r"^(\S+) does not have a deterministic implementation", str(error)):
            raise UserError(
                f"--bitwise: the model uses {found[1]}, which has no deterministic kernel on CUDA. Replace the layer, "
                "choose another model, or train without --bitwise."
            ) from error
    finally:
        model.zero_grad()


def _pool(input: Tensor, output_size: Any, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Pool the last two dimensions to `output_size`: a number or a pair, of which None keeps the input's."""
    sizes = output_size if isinstance(output_size, tuple) else (output_size, output_size)
    for dim, count in zip((-2, -1), sizes, strict=True):
        input = _pool_dimension(input, dim, count, reduce)
    return input


def _pool_dimension(input: Tensor, dim: int, count: int | None, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Pool one dimension to `count` windows; window i goes from floor(i n / count) to ceil((i + 1) n / count)."""
    length = input.shape[dim]
    if count is None or count == length:
        return input
    if length % count == 0:
        first = input.dim() + dim
        windows = (*input.shape[:first], count, length // count, *input.shape[first + 1 :])
        return reduce(input.reshape(windows), first + 1)
    starts = [number * length // count for number in range(count)]
    ends = [-(-(number + 1) * length // count) for number in range(count)]
    parts = [reduce(input.narrow(dim, start, end - start), dim) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(parts, dim)
