"""BatchNorm over virtual batches: however an update is cut, statistics, gradients and outputs are the same; also of
layers that one forward pass calls never, once or several times, and gradient checkpointing again."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_train.models.batchnorm import VirtualBatches, has_batchnorm, virtual_class

BATCH, VIRTUAL_BATCH = 24, 4


def net() -> nn.Module:
    """All kinds of BatchNorm, after each other; float64, so that differences are mistakes and not rounding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6, momentum=0.3),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        BatchNormAct2d(8, momentum=None),
        nn.Flatten(2),
        nn.BatchNorm1d(8, affine=False),
        nn.Unflatten(2, (3, 3, 1)),
        nn.BatchNorm3d(8),
        nn.Flatten(),
        nn.Linear(72, 5),
        nn.BatchNorm1d(5),
    ).double()


def updated(
    model: nn.Module, cut: int, real: int = BATCH, *, updates: int = 2, virtual_batch: int = VIRTUAL_BATCH
) -> dict[str, Tensor]:
    """Gradients and buffers after `updates` updates in micro-batches of `cut` samples, of which the first `real` are no
    padding."""
    model = copy.deepcopy(model).train()
    batches = VirtualBatches(model, virtual_batch)
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        images = torch.randn(BATCH, 3, 9, 9, dtype=torch.float64, generator=generator)
        weights = (torch.arange(BATCH) < real).float()
        for start in range(0, BATCH, cut):
            part = slice(start, start + cut)
            batches.begin(weights[part], padded=real < BATCH)
            (model(images[part]).square().sum(1) * weights[part]).sum().backward()
        batches.sum_processes()
        batches.end_update()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {**gradients, **dict(model.named_buffers())}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text)  # type: ignore[misc]


@pytest.mark.parametrize("real", [BATCH, 23, 18, 17, 9, 2, 1])
@pytest.mark.parametrize("cut", [4, 8, 12])
def test_however_the_update_is_cut(cut: int, real: int) -> None:
    assert_equal(updated(net(), BATCH, real), updated(net(), cut, real))


@pytest.mark.parametrize("real", [BATCH, 18, 10])
def test_each_virtual_batch_is_normalised_by_torch_itself(real: int) -> None:
    """Gradients are those of torch's BatchNorm on each virtual batch's real samples alone."""
    model = net()
    expected = copy.deepcopy(model).train()
    statistics: dict[str, list[Tensor]] = {}
    images = torch.randn(BATCH, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for start in range(0, real, VIRTUAL_BATCH):
        fresh = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in expected.named_buffers():
            buffer.copy_(fresh[name])
        for module in expected.modules():
            if virtual_class(type(module)):
                module.momentum = 1.0  # type: ignore[assignment]  # the running statistics become those of this batch
        expected(images[start : min(real, start + VIRTUAL_BATCH)]).square().sum().backward()
        for name, buffer in expected.named_buffers():
            statistics.setdefault(name, []).append(buffer.clone())
    result = updated(model, 8, real, updates=1)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(result[name], parameter.grad, rtol=1e-9, atol=1e-9)
    before = dict(model.named_buffers())
    momentum = {"1": 0.3, "4": 1.0}
    for name, seen in statistics.items():
        if "running" in name:
            share = momentum.get(name.split(".")[0], 0.1)
            mean = torch.stack(seen).mean(0)
            torch.testing.assert_close(result[name], before[name] * (1 - share) + mean * share, rtol=1e-9, atol=1e-9)
        else:
            assert result[name] == 1, "once an update"


def test_a_virtual_batch_of_one_value_is_normalised_by_the_running_statistics() -> None:
    """It has no variance; it changes no running statistics, and its output is evaluation's."""
    layer = nn.BatchNorm1d(5).double()
    layer.running_mean = torch.arange(5.0, dtype=torch.float64)
    layer.running_var = torch.arange(1.0, 6.0, dtype=torch.float64)
    values = torch.randn(4, 5, dtype=torch.float64)
    expected = copy.deepcopy(layer).eval()(values)
    batches = VirtualBatches(layer.train(), 1)
    batches.begin(torch.ones(4), padded=False)
    torch.testing.assert_close(layer(values), expected)
    batches.sum_processes()
    batches.end_update()
    assert torch.equal(layer.running_mean, torch.arange(5.0))


def test_padding_changes_nothing_even_if_it_is_huge() -> None:
    layer = nn.BatchNorm2d(3).double().train()
    batches = VirtualBatches(layer, 4)
    values = torch.randn(8, 3, 2, 2, dtype=torch.float64)
    outputs, buffers = [], []
    for padding in (0.0, 1e6):
        values[6:] = padding
        batches.begin((torch.arange(8) < 6).float(), padded=True)
        outputs.append(layer(values)[:6].clone())
        buffers.append(batches.current.clone())
        batches.discard()
    assert torch.equal(*outputs)
    assert torch.equal(*buffers)


def test_a_skipped_update_does_not_count() -> None:
    """Nor does an earlier one count again: what it has summed over its passes is forgotten."""
    model = net().train()
    fresh = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batches = VirtualBatches(model, VIRTUAL_BATCH)
    for _ in range(2):  # the first pass is in the sum when the second one begins
        batches.begin(torch.ones(BATCH), padded=False)
        model(torch.full((BATCH, 3, 9, 9), torch.nan, dtype=torch.float64))
    batches.discard()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    values = torch.randn(BATCH, 3, 9, 9, dtype=torch.float64)
    for each, sums in ((model, batches), (fresh, VirtualBatches(fresh, VIRTUAL_BATCH))):
        sums.begin(torch.ones(BATCH), padded=False)
        each(values)
        sums.sum_processes()
        sums.end_update()
    assert_equal(dict(model.named_buffers()), dict(fresh.named_buffers()))


def test_state_dict_hooks_and_references_stay() -> None:
    model = net()
    layer, calls = model[1], []  # type: ignore[index]
    layer.register_forward_hook(lambda *_: calls.append(1))
    names = list(model.state_dict())
    batches = VirtualBatches(model, VIRTUAL_BATCH)
    assert list(model.state_dict()) == names
    assert model[1] is layer  # type: ignore[index]
    assert isinstance(layer, nn.BatchNorm2d)
    batches.begin(torch.ones(4), padded=False)
    model(torch.randn(4, 3, 9, 9, dtype=torch.float64))
    assert calls


def test_evaluation_and_a_pass_outside_of_an_update_are_torchs() -> None:
    plain, model = net(), net()
    VirtualBatches(model, VIRTUAL_BATCH)
    images = torch.randn(6, 3, 9, 9, dtype=torch.float64)
    assert torch.equal(plain.eval()(images), model.eval()(images))
    assert torch.equal(plain.train()(images), model.train()(images))


def test_a_model_without_batchnorm() -> None:
    model = nn.Linear(3, 2)
    assert not has_batchnorm(model)
    batches = VirtualBatches(model, 4)
    batches.begin(torch.ones(4), padded=True)
    batches.sum_processes()
    batches.end_update()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_stays(format: torch.memory_format) -> None:
    layer = nn.BatchNorm2d(4).train()
    batches = VirtualBatches(layer, 4)
    values = torch.randn(8, 4, 5, 5).to(memory_format=format)
    for padded in (False, True):
        batches.begin(torch.ones(8), padded=padded)
        assert layer(values).is_contiguous(memory_format=format)


def test_bf16_is_normalised_in_float32() -> None:
    layer = nn.BatchNorm2d(4).train()
    batches = VirtualBatches(layer, 4)
    values = (100 + torch.randn(8, 4, 5, 5)).bfloat16()  # whose mean and variance bfloat16 cannot hold
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        for padded in (False, True):
            batches.begin(torch.ones(8), padded=padded)
            normalised = layer(values.to(dtype))
            assert normalised.dtype == dtype
            outputs.append(normalised.float())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-2, atol=1e-3)


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


def buffers_after(
    model: nn.Module, cut: int, real: int = BATCH, virtual_batch: int = VIRTUAL_BATCH
) -> dict[str, Tensor]:
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
    buffers_after(model, 8, virtual_batch=virtual_batch)
    assert torch.isfinite(next(model.parameters()).grad).all()  # type: ignore[arg-type]
    buffers_after(Prototypes(), 8, virtual_batch=virtual_batch)


@pytest.mark.parametrize("recomputes", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize(("calls", "real"), [(1, BATCH), (2, BATCH), (3, 18), (2, 10)])
def test_each_call_counts_and_a_recomputation_does_not(
    calls: int, real: int, momentum: float | None, recomputes: str
) -> None:
    model = Shared(calls, recomputes=recomputes, momentum=momentum)
    buffers = buffers_after(model, 8, real)
    mean, variance = by_hand(real, model.scales, momentum=momentum)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
    assert buffers["norm.num_batches_tracked"] == 2


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
    buffers = buffers_after(torch.compile(model, backend="aot_eager"), 8)  # type: ignore[arg-type]
    mean, variance = by_hand(BATCH, model.scales)
    torch.testing.assert_close(buffers["norm.running_mean"], mean)
    torch.testing.assert_close(buffers["norm.running_var"], variance)
