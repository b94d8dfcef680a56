"""BatchNorms that one forward pass calls never, once or several times, and gradient checkpointing again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_train.models.batchnorm import VirtualBatches

BATCH, VIRTUAL_BATCH = 24, 4


class Prototypes(nn.Module):
    """Its second BatchNorm normalises learned prototypes, whose number is not that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
        self.prototypes = nn.Parameter(torch.randn(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images).relu().mean((2, 3)) @ self.second(self.prototypes).t()


class Shared(nn.Module):
    """One BatchNorm for the images, and for the same images on another scale; another one that is never called."""

    def __init__(self, *, calls: int = 2, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.unused = nn.BatchNorm2d(3, momentum=0.3), nn.BatchNorm2d(3)
        self.scales, self.recomputes = [1.0, 5.0, 2.0][:calls], recomputes

    def forward(self, images: Tensor) -> Tensor:
        inputs = [images * scale + scale for scale in self.scales]
        outputs = [
            checkpoint(self.norm, each, use_reentrant=False) if self.recomputes else self.norm(each) for each in inputs
        ]
        return torch.stack(outputs).square().sum((0, 2, 3, 4))


def images(update: int) -> Tensor:
    return torch.randn(BATCH, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(update))


def updated(model: nn.Module, cut: int, real: int = BATCH, *, virtual_batch: int = VIRTUAL_BATCH) -> dict[str, Tensor]:
    """The buffers after two updates in micro-batches of `cut` samples, of which the first `real` are no padding."""
    model.double().train()
    bare = getattr(model, "_orig_mod", model)
    batches = VirtualBatches(bare, virtual_batch)
    for update in range(2):
        weights = (torch.arange(BATCH) < real).float()
        for start in range(0, BATCH, cut):
            part = slice(start, start + cut)
            batches.begin(weights[part], padded=real < BATCH)
            model(images(update)[part].requires_grad_()).sum().backward()
        batches.end_update()
    return {name: value.clone() for name, value in bare.named_buffers()}


def by_hand(real: int, scales: list[float]) -> tuple[Tensor, Tensor]:
    """The running mean and variance: each virtual batch of each call counts once, and an update moves them once."""
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    for update in range(2):
        parts = [
            (part * scale + scale).transpose(0, 1).flatten(1)
            for part in torch.split(images(update)[:real], VIRTUAL_BATCH)
            for scale in scales
        ]
        mean = mean.lerp(torch.stack([part.mean(1) for part in parts]).mean(0), 0.3)
        variance = variance.lerp(torch.stack([part.var(1) for part in parts]).mean(0), 0.3)
    return mean, variance


@pytest.mark.parametrize("virtual_batch", [1, 4])
def test_the_backward_pass_of_layers_that_collect_in_two_ways(virtual_batch: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten())
    updated(model, 8, virtual_batch=virtual_batch)
    assert torch.isfinite(next(model.parameters()).grad).all()  # type: ignore[arg-type]
    updated(Prototypes(), 8, virtual_batch=virtual_batch)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("real", [BATCH, 18, 10])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_each_call_counts_and_a_recomputation_does_not(calls: int, real: int, recomputes: bool) -> None:
    model = Shared(calls=calls, recomputes=recomputes)
    buffers = updated(model, 8, real)
    mean, variance = by_hand(real, model.scales)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
    assert buffers["norm.num_batches_tracked"] == 2
    assert not buffers["unused.running_mean"].any()
    assert (buffers["unused.running_var"] == 1).all()


def test_the_exact_sum_has_one_row_for_each_virtual_batch_however_often_a_layer_is_called() -> None:
    """Processes finish their virtual batches in any order: the bits do not depend on it."""
    found = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3]):
        model = Shared()
        batches = VirtualBatches(model, VIRTUAL_BATCH, len(order))
        for update in range(2):
            for number in order:
                batches.begin(torch.ones(VIRTUAL_BATCH), padded=False)
                model(torch.split(images(update).float(), VIRTUAL_BATCH)[number])
            batches.end_update()
        found.append((model.norm.running_mean, model.norm.running_var))
    for one, other, expected in zip(*found, by_hand(BATCH, Shared().scales), strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]
        torch.testing.assert_close(one, expected.float())


def test_compiled_each_call_counts() -> None:
    model = Shared()
    buffers = updated(torch.compile(model, backend="aot_eager"), 8)  # type: ignore[arg-type]
    mean, variance = by_hand(BATCH, model.scales)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
