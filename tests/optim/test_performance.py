"""What is done for speed changes no result; and what to do if the memory of a device is too small."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import TorchDynamoPlugin
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

from accel_train import models
from accel_train.config.schema import Model
from accel_train.data.order import Plan
from accel_train.errors import UserError
from accel_train.models.nets import PaddingAwareConv2d, use_padding_aware_convolutions
from accel_train.optim.performance import (
    evaluation_advice,
    memory_advice,
    prepare_compilation,
    training_advice,
    unwrap_optimizer,
    use_fastest_memory_format,
)


def make(name: str, size: int) -> nn.Module:
    torch.manual_seed(0)
    return models.create_model(Model(name=name), num_classes=10, channels=1, image_size=size)


@torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # monkeypatch would delete it afterwards
def test_each_size_of_images_is_compiled_for_itself() -> None:
    """And not the second one for any size, which takes inductor many times as long."""
    state = SimpleNamespace(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    accelerator: Any = SimpleNamespace(state=state, device=torch.device("cpu"), gradient_accumulation_steps=1)
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append([[type(length) for length in each.shape] for each in inputs if isinstance(each, torch.Tensor)])
        return graph.forward

    for size_of_evaluation, passes in ((None, 2), (12, 3)):
        prepare_compilation(accelerator, Model(eval_image_size=size_of_evaluation))
        torch._dynamo.reset()
        compiled.clear()
        net = torch.compile(nn.Conv2d(1, 2, 3), backend=backend)
        for size in (8, 12, 16, 8):
            net(torch.zeros(1, 1, size, size))
        assert len(compiled) == passes
    assert {length for inputs in compiled for shape in inputs for length in shape} == {int}
    torch._dynamo.reset()


def test_nets_of_convolutions_are_channels_last_and_transformers_are_not() -> None:
    accelerator = Accelerator(cpu=True)
    net = make("mnist_cnn", 28)
    assert use_fastest_memory_format(accelerator, net) == torch.channels_last
    assert all(weights.is_contiguous() for weights in net.parameters())  # on a CPU
    assert use_fastest_memory_format(accelerator, make("vit_s16_plain", 32)) == torch.contiguous_format


@pytest.mark.parametrize(("name", "size", "batch"), [("mnist_cnn", 28, 128), ("torchvision/resnet18", 32, 4)])
def test_gradients_lie_as_their_weights_do(name: str, size: int, batch: int) -> None:
    """Else DDP warns of each, and copies it, and so do fused optimizers."""
    net = make(name, size)
    layout = use_fastest_memory_format(Accelerator(cpu=True), net)
    net(torch.rand(batch, 1, size, size).to(memory_format=layout, copy=True)).sum().backward()  # as augment.py does
    for weight in net.parameters():
        assert weight.grad is not None
        assert weight.grad.stride() == weight.stride(), weight.shape


def test_accelerates_optimizer_steps_only_where_a_scaler_needs_it() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    Accelerator(cpu=True)  # the state that its optimizer reads
    assert unwrap_optimizer(AcceleratedOptimizer(inner)) is inner
    scaled = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu"))
    assert unwrap_optimizer(scaled) is scaled


SIDES = st.tuples(st.integers(1, 6), st.integers(1, 6))


def outcome(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """What comes out, and all gradients."""
    images = images.clone().requires_grad_()
    found = model(images)
    (found * torch.arange(found.numel(), dtype=torch.float64).view(found.shape)).sum().backward()
    gradients = [parameter.grad for parameter in (*model.parameters(), images)]
    return [found.detach(), *(gradient for gradient in gradients if gradient is not None)]


@example((1, 1), (1, 1), (3, 3), (1, 1), 1, False)  # no tap sees any pixel
@given(SIDES, SIDES, st.tuples(st.integers(1, 3), st.integers(1, 3)), SIDES, st.sampled_from([1, 2]), st.booleans())
def test_it_is_the_same_function(
    sides: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    groups: int,
    bias: bool,
) -> None:
    assume(all(side + 2 * pad >= size for side, pad, size in zip(sides, padding, kernel, strict=True)))
    torch.manual_seed(0)
    plain = nn.Conv2d(2, 4, kernel, stride, padding, groups=groups, bias=bias).double()
    aware = copy.deepcopy(plain)
    use_padding_aware_convolutions(aware)
    assert type(aware) is PaddingAwareConv2d
    images = torch.randn(3, 2, *sides, dtype=torch.float64)
    for one, other in zip(outcome(plain, images), outcome(aware, images), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "other",
    [nn.Conv2d(2, 2, 3, padding="same"), nn.Conv2d(2, 2, 3, padding_mode="reflect"), nn.Conv2d(2, 2, 3, dilation=2)],
)
def test_others_stay_as_they_are(other: nn.Conv2d) -> None:
    use_padding_aware_convolutions(other)
    assert type(other) is nn.Conv2d


def test_advice_names_a_number_that_is_possible() -> None:
    plan = Plan(1000, 96, 2, 2, virtual_batch=8)  # of 48 samples of a process 24 at once; possible: 8, 16, 24, 48
    assert "with 24 images of a process at once: give --micro-batch-size 8," in training_advice(plan)
    smallest = Plan(1000, 96, 2, 6, virtual_batch=8)
    assert "which cannot be fewer: use --model.gradient-checkpointing true" in training_advice(smallest)
    assert evaluation_advice(256).endswith("give --eval-batch-size 128")
    assert "gradient-checkpointing" in evaluation_advice(1)
    with pytest.raises(UserError, match=r"^out of memory in training, .*\.$"), memory_advice(training_advice(plan)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with pytest.raises(RuntimeError, match="shapes"), memory_advice("never"):
        raise RuntimeError("shapes do not fit")
