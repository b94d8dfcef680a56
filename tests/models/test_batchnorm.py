"""BatchNorm over virtual batches: however an update is cut, statistics, gradients and outputs are the same."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

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
    values = torch.randn(8, 4, 5, 5)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        for padded in (False, True):
            batches.begin(torch.ones(8), padded=padded)
            normalised = layer(values.to(dtype))
            assert normalised.dtype == dtype
            outputs.append(normalised.float())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=2e-2, atol=2e-2)
