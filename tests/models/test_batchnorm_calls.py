"""BatchNorms that one forward pass calls never, once or several times, and gradient checkpointing again."""

from __future__ import annotations

import copy

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
        logits: Tensor = self.first(images).relu().mean((2, 3)) @ self.second(self.prototypes).t()
        return logits


class Shared(nn.Module):
    """One BatchNorm for the images, and for the same images on other scales."""

    def __init__(self, calls: int = 2, *, recomputes: str = "", momentum: float | None = 0.3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=momentum)
        self.scales, self.recomputes = [1.0, 5.0, 2.0][:calls], recomputes

    def forward(self, images: Tensor) -> Tensor:
        inputs = [images * scale + scale for scale in self.scales]
        if self.recomputes:
            outputs = [checkpoint(self.norm, each, use_reentrant=self.recomputes == "reentrant") for each in inputs]
        else:
            outputs = [self.norm(each) for each in inputs]
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
        batches.sum_processes()
        batches.end_update()
    return {name: value.clone() for name, value in bare.named_buffers()}


def by_hand(real: int, scales: list[float], *, momentum: float | None = 0.3) -> tuple[Tensor, Tensor]:
    """The running mean and variance: each virtual batch of each call counts once, and an update moves them once."""
    mean, variance = torch.zeros(3).double(), torch.ones(3).double()
    for update in range(2):
        parts = [
            (part * scale + scale).transpose(0, 1).flatten(1)
            for part in torch.split(images(update)[:real], VIRTUAL_BATCH)
            for scale in scales
        ]
        share = 1 / (update + 1) if momentum is None else momentum
        mean = mean.lerp(torch.stack([part.mean(1) for part in parts]).mean(0), share)
        variance = variance.lerp(torch.stack([part.var(1) for part in parts]).mean(0), share)
    return mean, variance


@pytest.mark.parametrize("virtual_batch", [1, 4])
def test_the_backward_pass_of_layers_that_collect_in_two_ways(virtual_batch: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten())
    updated(model, 8, virtual_batch=virtual_batch)
    assert torch.isfinite(next(model.parameters()).grad).all()  # type: ignore[arg-type]
    updated(Prototypes(), 8, virtual_batch=virtual_batch)


@pytest.mark.parametrize("recomputes", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize(("calls", "real"), [(1, BATCH), (2, BATCH), (3, 18), (2, 10)])
def test_each_call_counts_and_a_recomputation_does_not(calls: int, real: int, recomputes: str) -> None:
    model = Shared(calls, recomputes=recomputes)
    buffers = updated(model, 8, real)
    mean, variance = by_hand(real, model.scales)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
    assert buffers["norm.num_batches_tracked"] == 2


@pytest.mark.parametrize("real", [BATCH, 10])
def test_several_calls_in_the_mean_over_all_updates(real: int) -> None:
    model = Shared(momentum=None)
    buffers = updated(model, 8, real)
    mean, variance = by_hand(real, model.scales, momentum=None)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)


@pytest.mark.parametrize("exact", [None, 2])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_an_update_that_does_not_call_a_layer_does_not_count_in_it(momentum: float | None, exact: int | None) -> None:
    """Its mean over all updates is that of those with a call. Another layer is never called, a third one always."""
    layers = [nn.BatchNorm1d(3, momentum=momentum) for _ in range(3)]
    sometimes, never, always = layers
    batches = VirtualBatches(nn.ModuleList(layers).train(), VIRTUAL_BATCH, exact)
    parts = torch.split(images(0)[:8, :, 0, 0].float(), VIRTUAL_BATCH)
    for calls in (False, True, False, True):
        for part in parts:
            batches.begin(torch.ones(VIRTUAL_BATCH), padded=False)
            always(part)
            if calls:
                sometimes(part)
        batches.sum_processes()
        batches.end_update()
    assert [int(layer.num_batches_tracked or 0) for layer in layers] == [2, 0, 4]
    torch.testing.assert_close(never.state_dict(), nn.BatchNorm1d(3).state_dict())
    mean = torch.stack([part.mean(0) for part in parts]).mean(0)
    for layer, updates in ((sometimes, 2), (always, 4)):
        share = 1.0 if momentum is None else 1 - (1 - momentum) ** updates
        torch.testing.assert_close(layer.running_mean, share * mean)


def test_the_statistics_of_a_frozen_layer_stay_however_often_it_is_called() -> None:
    body, shared = nn.BatchNorm2d(3), Shared()
    model = nn.Sequential(body, shared).train()
    batches = VirtualBatches(model, VIRTUAL_BATCH)
    body.eval()  # as models.set_train_mode does for --model.freeze-body
    before, trained = copy.deepcopy(body.state_dict()), []
    for update in range(2):
        batches.begin(torch.ones(8), padded=False)
        model(body(images(update)[:8].float()))
        batches.sum_processes()
        batches.end_update()
        trained.append(copy.deepcopy(shared.norm.state_dict()))
        shared.norm.eval()
    torch.testing.assert_close(body.state_dict(), before)
    assert trained[0]["num_batches_tracked"] == 1 and trained[0]["running_mean"].any()
    torch.testing.assert_close(trained[0], trained[1])


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
            batches.sum_processes()
            batches.end_update()
        found.append((model.norm.running_mean, model.norm.running_var))
    for one, other, expected in zip(*found, by_hand(BATCH, Shared().scales), strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected.float())


@pytest.mark.slow
def test_compiled_each_call_counts() -> None:
    model = Shared()
    buffers = updated(torch.compile(model, backend="aot_eager"), 8)  # type: ignore[arg-type]
    mean, variance = by_hand(BATCH, model.scales)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
