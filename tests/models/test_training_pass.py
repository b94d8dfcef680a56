"""models/training_pass.py: what a forward pass of training changes or leaves out is found, and nothing else is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd_models import Centred, Experts, Restless, SharedNorm
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchvision.ops import FrozenBatchNorm2d

from accel_train.errors import UserError
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.training_pass import TrainingPass, of_all_sizes, try_training
from accel_train.models.trial import different_images, raise_unused_parameters_advice


def tried(middle: Callable[[Tensor], Any], *, gradients: bool = True) -> TrainingPass:
    """What is found in a model of three channels with `middle` in it. It must be as before."""
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3), as_module(middle), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 5)
    )
    model.train()
    virtual_batches = VirtualBatches(model, 2)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate()
    result = try_training(model, different_images(3, 8), virtual_batches.modules, gradients=gradients)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.get_rng_state().equal(states[0]) and random.getstate() == states[1]
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    return result


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def as_module(function: Callable[[Tensor], Any]) -> nn.Module:
    return function if isinstance(function, nn.Module) else Call(function)


class WithBuffer(nn.Module):
    """Changes its buffer by a function of (buffer, input), in place."""

    value: Tensor

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.value.copy_(self.change(self.value, x))
        return x


class Table(nn.Module):
    """Keeps a table for as many samples as it has just seen."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != len(x):
            self.table = torch.ones(len(x))
        return x * self.table.view(-1, 1, 1, 1)


class TestBuffers:
    @pytest.mark.parametrize(
        ("middle", "changing"),
        [
            (nn.BatchNorm2d(3), ""),  # VirtualBatches takes care of it
            (FrozenBatchNorm2d(3), ""),
            (nn.InstanceNorm2d(3), ""),
            (nn.InstanceNorm2d(3, track_running_stats=True), "1.running_mean (InstanceNorm2d)"),
            (spectral_norm(nn.Conv2d(3, 3, 1)), "1.parametrizations.weight.0._u (_SpectralNorm)"),
            (Centred(), "1.mean (Centred)"),
            (WithBuffer(lambda value, x: value + 1), "1.value (WithBuffer)"),  # a counter
            (WithBuffer(lambda value, x: x.mean((0, 2, 3))), "1.value (WithBuffer)"),  # of the last pass
            (
                WithBuffer(lambda value, x: value if value.any() else x.std((0, 2, 3))),
                "1.value (WithBuffer)",
            ),  # the first
            (
                WithBuffer(lambda value, x: torch.maximum(value, x.abs().amax((0, 2, 3)).clamp(20))),
                "1.value (WithBuffer)",
            ),  # the largest so far: the images that are tried have no larger one
            (WithBuffer(lambda value, x: torch.ones(3)), ""),  # a table
            (WithBuffer(lambda value, x: torch.ones(3) * torch.nan), ""),
            (Table(), ""),
        ],
    )
    def test_what_a_pass_changes(self, middle: nn.Module, changing: str) -> None:
        found = tried(middle, gradients=False)
        assert found.changing[:1] == ((changing,) if changing else ())
        for bitwise in (False, True):
            warnings = found.warnings(bitwise=bitwise)
            assert len(warnings) == bool(changing)
            assert not changing or f"changes the buffer {changing}" in warnings[0]

    def test_a_model_without_buffers_and_on_one_process_is_not_tried(self) -> None:
        def fail(x: Tensor) -> None:
            raise AssertionError

        assert tried(fail, gradients=False) == TrainingPass()

    def test_a_model_that_fails_says_nothing(self) -> None:
        assert tried(lambda x: x @ x.new_zeros(7, 7)) == TrainingPass()


def is_left_out(middle: Callable[[Tensor], Any]) -> bool:
    return tried(middle).leaves_out


class Alternating(nn.Module):
    """Uses its layer in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Conv2d(3, 3, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 2 else x


class TestParameters:
    def test_those_that_a_pass_leaves_out(self) -> None:
        class Unused(nn.Identity):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 2)

        unused, frozen = Unused(), Unused()
        frozen.layer.requires_grad_(False)
        assert is_left_out(unused) and is_left_out(Alternating())
        assert not is_left_out(frozen) and not is_left_out(nn.Dropout(0.5)) and not is_left_out(nn.BatchNorm2d(3))
        assert not tried(unused, gradients=False).leaves_out

    @pytest.mark.parametrize(
        "decides",
        [
            lambda x: random.random() < 2,
            lambda x: torch.rand(()) < 2,
            lambda x: x.mean().item() < 1e9,
            lambda x: bool((x > 1e9).any()) or True,
        ],
    )
    def test_those_that_it_may_leave_out(self, decides: Callable[[Tensor], Any]) -> None:
        """All passes of the trial used them, by a decision that may be another one in training."""
        assert is_left_out(lambda x: x if decides(x) else x * 2)

    def test_the_models_of_the_tests_with_processes(self) -> None:
        for model in (SharedNorm(5, 3), Experts(5, 3), Restless(5, 3)):
            assert try_training(model.train(), different_images(3, 8), [], gradients=True).leaves_out

    def test_ddp_s_own_error_becomes_advice(self) -> None:
        error = "Expected to have finished reduction in the prior iteration before starting a new one."
        with pytest.raises(UserError, match="--bitwise true"):
            raise_unused_parameters_advice(RuntimeError(error))
        raise_unused_parameters_advice(RuntimeError("another"))


class OfParts(nn.Module):
    """A BatchNorm over what each of some functions makes of the images' features [b, 3]."""

    def __init__(self, *parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.parts = nn.BatchNorm1d(3), parts

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean((2, 3))
        return torch.stack([x, *(x + self.norm(part(features)).sum() for part in self.parts)]).sum(0)


def own(x: Tensor) -> Tensor:
    return x


def two_of_each(x: Tensor) -> Tensor:
    return torch.cat([x, 2 * x])


def prototypes(_: Tensor) -> Tensor:
    return torch.ones(8, 3)  # as many as four, or two, of each sample


def all_but_one(x: Tensor) -> Tensor:
    return x[1:]


class TestBatchNorms:
    @pytest.mark.parametrize(
        ("parts", "irregular", "of_no_sample", "uneven"),
        [
            ([own], False, False, False),
            ([two_of_each], False, False, False),
            ([own, own], True, False, False),
            ([own, two_of_each], True, False, False),
            ([], True, False, False),
            ([prototypes], True, True, False),
            ([own, prototypes], True, False, True),
            ([all_but_one], True, False, True),
        ],
    )
    def test_how_often_and_for_whose_values_it_is_called(
        self, parts: list[Callable[[Tensor], Tensor]], irregular: bool, of_no_sample: bool, uneven: bool
    ) -> None:
        found = tried(OfParts(*parts))
        assert (found.irregular, bool(found.of_no_sample), bool(found.uneven)) == (irregular, of_no_sample, uneven)
        warnings = found.warnings(bitwise=False)
        assert len(warnings) == uneven and not found.warnings(bitwise=True)
        assert not uneven or "1.norm (VirtualBatchNorm1d) normalises together" in warnings[0]


def test_passes_with_images_of_several_sizes_are_one() -> None:
    small, large = TrainingPass(("a.running_mean (InstanceNorm2d)",)), TrainingPass((), True, True)
    assert of_all_sizes([small]) == small
    assert of_all_sizes([small, large]) == TrainingPass(("a.running_mean (InstanceNorm2d)",), True, True)
    with pytest.raises(UserError, match="a BatchNorm of the model normalises values of its samples at some"):
        of_all_sizes([TrainingPass(of_no_sample=(0,)), TrainingPass()])
