"""What `--bitwise true` relies on: a pass with one virtual batch, or with padding, keeps its bits.

Each of them is compared with the operators that computed it when runs of that kind were first stored. Stored numbers
would hold for one CPU and one torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.models.batchnorm import VirtualBatches

ROWS, CHANNELS = 16, 8
LAYOUTS = torch.contiguous_format, torch.channels_last
KINDS = torch.float32, torch.float64, torch.bfloat16, torch.float16


def inputs(samples: int, layout: torch.memory_format, kind: torch.dtype) -> tuple[nn.BatchNorm2d, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(CHANNELS).train()
    if kind == torch.float64:
        layer.double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    images = (3 * torch.randn(samples, CHANNELS, 7, 9) + 2).to(kind).contiguous(memory_format=layout)
    return layer, images.requires_grad_(), torch.randn_like(images)


def bits(layer: nn.BatchNorm2d, images: Tensor, gradient: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    output = call(images)
    output.backward(gradient)
    found = [output.detach(), images.grad, layer.weight.grad, layer.bias.grad]
    images.grad = layer.weight.grad = layer.bias.grad = None
    return [each.clone() for each in found if each is not None]


def padded(layer: nn.BatchNorm2d, images: Tensor, real: Tensor, rows: int) -> tuple[Tensor, list[Tensor]]:
    """The output and the statistics [virtual batches, channels]: mean, unbiased variance, whether they count."""
    groups = images.view(-1, rows, CHANNELS, 7, 9).to(torch.promote_types(images.dtype, torch.float32))
    weights = real.view(-1, rows, 1, 1, 1).to(groups)
    count = weights.sum(1, keepdim=True) * 63
    mean = (groups * weights).sum((1, 3, 4), keepdim=True) / count.clamp(min=1)
    variance = ((groups - mean).square() * weights).sum((1, 3, 4), keepdim=True) / count.clamp(min=1)
    statistics = [mean, variance * (count / (count - 1).clamp(min=1)), torch.ones_like(mean)]
    statistics = [torch.where(count >= 2, each, 0).flatten(1).detach() for each in statistics]
    mean = torch.where(count >= 2, mean, 0)
    variance = torch.where(count >= 2, variance, 1)
    scale = torch.rsqrt(variance + layer.eps) * layer.weight.view(1, 1, -1, 1, 1)
    output = (groups - mean) * scale + layer.bias.view(1, 1, -1, 1, 1)
    return output.flatten(0, 1).to(images.dtype), statistics


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_virtual_batch_has_the_bits_of_torchs_kernel(layout: torch.memory_format, kind: torch.dtype) -> None:
    layer, images, gradient = inputs(ROWS, layout, kind)
    mean, variance = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)  # type: ignore[arg-type]
    expected = bits(
        layer,
        images,
        gradient,
        lambda values: F.batch_norm(values, mean, variance, layer.weight, layer.bias, True, 1.0, layer.eps),
    )
    batches = VirtualBatches(layer, ROWS)
    batches.begin(torch.ones(ROWS), padded=False)
    assert all(map(torch.equal, bits(layer, images, gradient, layer), expected))
    assert torch.equal(batches.current[0, :2], torch.stack([mean, variance]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("virtual_batches", "real"), [(1, 13), (1, 16), (3, 20), (3, 48)])
def test_a_padded_pass_has_the_bits_of_its_formula(
    virtual_batches: int, real: int, layout: torch.memory_format, kind: torch.dtype
) -> None:
    samples = virtual_batches * ROWS
    layer, images, gradient = inputs(samples, layout, kind)
    weights = (torch.arange(samples) < real).float()
    expected = bits(layer, images, gradient, lambda values: padded(layer, values, weights, ROWS)[0])
    statistics = padded(layer, images, weights, ROWS)[1]
    batches = VirtualBatches(layer, ROWS)
    batches.begin(weights, padded=True)
    assert all(map(torch.equal, bits(layer, images, gradient, layer), expected))
    assert torch.equal(batches.current, torch.stack(statistics, 1))
