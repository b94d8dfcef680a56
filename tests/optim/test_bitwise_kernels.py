"""What `--bitwise true` refuses, the kernels it asks for, and its adaptive pooling, which is torch's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_train.config.options import parse
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.optim.bitwise import REPLACED, use_deterministic_kernels, use_deterministic_layers, what_bits_depend_on


def accelerator(
    device: str = "cpu", mixed_precision: str = "no", backend: DynamoBackend = DynamoBackend.NO, kind: str = "NO"
) -> Any:
    """The parts of an Accelerator that are asked for; most of these devices are not here."""
    state = SimpleNamespace(dynamo_plugin=SimpleNamespace(backend=backend), mixed_precision=mixed_precision)
    return SimpleNamespace(
        device=torch.device(device),
        mixed_precision=mixed_precision,
        state=state,
        distributed_type=DistributedType[kind],
        is_fsdp2=kind == "FSDP",
    )


@pytest.fixture
def kernels() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"kind": "FSDP"}, "FSDP sums the gradients itself"),
        ({"backend": DynamoBackend.INDUCTOR}, "torch.compile may choose its kernels by their speed"),
        ({"mixed_precision": "fp16", "device": "cuda"}, "fp16 skips updates by a scale of its own"),
        ({"mixed_precision": "fp8", "device": "cuda"}, "fp8 skips updates by a scale of its own"),
        ({"device": "mps"}, "mps devices have no float64"),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_what_cannot_be_the_same_to_the_bit_is_refused(made: dict[str, Any], message: str) -> None:
    config = parse(["digits", "--bitwise", "true"])
    with pytest.raises(UserError, match=f"^--bitwise: .*{message}"):
        use_deterministic_kernels(config, accelerator(**made))
    use_deterministic_kernels(parse(["digits"]), accelerator(**made))  # without it, all are possible


@pytest.mark.parametrize("made", [{}, {"mixed_precision": "bf16"}, {"kind": "MULTI_CPU"}])
@pytest.mark.usefixtures("kernels")
def test_bitwise_runs_use_deterministic_kernels_and_others_do_not(made: dict[str, Any]) -> None:
    use_deterministic_kernels(parse(["digits", "--bitwise", "true"]), accelerator(**made))
    assert torch.are_deterministic_algorithms_enabled()
    use_deterministic_kernels(parse(["digits"]), accelerator(**made))
    assert not torch.are_deterministic_algorithms_enabled()


def test_threads_are_part_of_what_the_bits_depend_on() -> None:
    facts = what_bits_depend_on(accelerator())
    assert facts["threads of a process"] == str(torch.get_num_threads())
    assert facts["device"] == "cpu"


SIDES = st.integers(1, 14)
SIZES = st.one_of(SIDES, st.tuples(st.none() | SIDES, st.none() | SIDES))


@given(SIDES, SIDES, SIZES, st.sampled_from(list(REPLACED)), st.booleans())
def test_values_and_gradients(height: int, width: int, size: object, kind: type[nn.Module], batched: bool) -> None:
    shape = (2, 3, height, width) if batched else (3, height, width)
    generator = torch.Generator().manual_seed(height * 100 + width)
    one = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    other = one.detach().clone().requires_grad_()
    expected, found = kind(size)(one), REPLACED[kind](size)(other)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(other.grad, one.grad)


def test_on_a_cpu_nothing_is_replaced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3))
    use_deterministic_layers(Config(bitwise=True), model, 3, 16)
    assert type(model[1]) is nn.AdaptiveAvgPool2d
