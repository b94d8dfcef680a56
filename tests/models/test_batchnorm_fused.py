"""Our Triton kernels give, in Triton's interpreter, what torch's operators give. test_gpu.py runs them on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import helpers
import pytest

COMPARED = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from accel_train.models import batchnorm_triton as fused
from accel_train.models.batchnorm_kernels import ComposedBatchNorm

ROWS, COUNT = 4, 5

class Operators(TorchDispatchMode):
    "Notes torch's operators that compute something."
    def __init__(self):
        super().__init__()
        self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if not any(part in name for part in ("empty", "view", "unbind", "detach", "as_strided")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))

launches, launch = [], fused.launch
def counted(kernel, grid, *arguments, **constants):
    launches.append(grid)
    with torch._C._DisableTorchDispatch():  # the interpreter's own operators
        launch(kernel, grid, *arguments, **constants)
fused.launch = counted

def results(way, values, gradient, affine, statistics):
    torch.manual_seed(1)
    exact = way is ComposedBatchNorm and values.dtype == torch.float32
    kind = torch.float64 if exact else values.dtype
    values = values.detach().to(kind).requires_grad_()
    parameters = torch.float64 if exact else torch.float32
    channels = values.shape[1]
    weight, bias = (torch.randn(channels).to(parameters).requires_grad_() if affine else None for _ in range(2))
    if way is ComposedBatchNorm:
        normalised, mean, variance = way.apply(values, ROWS, weight, bias, 1e-5)
        normalised.backward(gradient.to(kind))
    else:
        with Operators() as operators:
            normalised = way.apply(values, ROWS, weight, bias, 1e-5, statistics)
        torch.autograd.backward(normalised, gradient)
        mean, variance = statistics[:, 0], statistics[:, 1]
        assert not operators.seen, operators.seen
        assert not statistics[:, 2:].any() and normalised.stride() == values.stride() == values.grad.stride()
    return [normalised, mean, variance, values.grad, *(each.grad for each in (weight, bias) if affine)]

kind = getattr(torch, sys.argv[1])
generator = torch.Generator().manual_seed(0)
for programs, tile in ((1, 1 << 16), (40, 256)):  # one piece of a virtual batch; many, with a rest
    fused.PROGRAMS, fused.TILE, pieces = programs, tile, set()
    for shape in ((6,), (6, 7), (6, 5, 3), (34, 5, 5), (6, 2, 3, 4)):
        values = torch.randn(COUNT * ROWS, *shape, generator=generator) * 3 + 20
        gradient = torch.randn(values.shape, generator=generator).to(kind)
        for layout in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 3 else 1]:
            values = values.to(kind).contiguous(memory_format=layout)
            for affine, other in ((True, layout), (False, torch.contiguous_format)):  # of the gradient
                statistics = torch.zeros(COUNT, 3, shape[0])
                launches.clear()
                given = gradient.contiguous(memory_format=other)
                found = results(fused.Fused, values, given, affine, statistics)
                assert len(launches) == 4, launches
                pieces.update(grid[1] for grid in launches)
                expected = results(ComposedBatchNorm, values, gradient, affine, None)
                for number, (one, two) in enumerate(zip(found, expected, strict=True)):
                    error = ((one.double() - two.double()).norm() / two.double().norm()).item()
                    assert error < (2e-5 if kind == torch.float32 else 1e-2), (shape, layout, affine, number, error)
    assert (max(pieces) > 1) == (programs > 1), pieces

fused.PROGRAMS, fused.TILE = 1024, 2048
values = 1000 + torch.randn(COUNT * ROWS, 6, 32, 32, generator=generator)
statistics = torch.zeros(COUNT, 2, 6)
fused.Fused.apply(values, ROWS, None, None, 1e-5, statistics)
expected = values.double().view(COUNT, ROWS, 6, -1).transpose(1, 2).flatten(2).var(2)
assert ((statistics[:, 1] - expected) / expected).abs().max() < 1e-4  # a sum of squares would lose it
"""


def interpret(*words: str) -> None:
    """Run a program in a new process, because Triton reads its variable when it is imported."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(helpers.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", *words], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_kernels_give_what_torchs_operators_give(kind: str) -> None:
    interpret(COMPARED, kind)


LAYERS = """
import torch
from torch import nn
from accel_train.models import batchnorm
from accel_train.models.batchnorm import VirtualBatches

class Net(nn.Module):
    "Calls one of its BatchNorms twice."
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.other = nn.BatchNorm2d(6, affine=False)
    def forward(self, images):
        return self.other(self.norm(self.norm(self.first(images)).relu()))

found = []
for triton in (False, True):
    batchnorm.is_fused = lambda _: triton
    torch.manual_seed(0)
    net = Net().train()
    batches = VirtualBatches(net, 4)
    for _ in range(2):
        for _ in range(2):
            batches.begin(torch.ones(12), padded=False)
            output = net(torch.randn(12, 3, 6, 6))
            output.backward(torch.randn(output.shape))
        batches.sum_processes()
        batches.end_update()
    found.append([*(value for value in net.state_dict().values()), *(each.grad for each in net.parameters())])
for one, other in zip(*found, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_layers_collect_their_statistics() -> None:
    interpret(LAYERS)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from accel_train.models import batchnorm_triton as fused

H100 = GPUTarget("cuda", 90, 32)
floats = dict.fromkeys(("pieces", "saved", "kept", "weight", "bias", "of_parameters"), "*fp32") | {"eps": "fp32"}
for kind in ("fp32", "bf16"):
    pointers = floats | dict.fromkeys("xyg", f"*{kind}")
    for name in ("_sum_values", "_normalise", "_sum_gradients", "_differentiate"):
        kernel = getattr(fused, name)
        sizes = {"BLOCK": 32, "BLOCK_CHANNELS": 64}
        constants = {each: sizes.get(each, 1) for each in kernel.arg_names if each.isupper()}
        types = {each: pointers.get(each, "i32") for each in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        compiled = triton.compile(source, target=H100, options={"enable_fp_fusion": True})
        assert compiled.asm["cubin"]
"""


@pytest.mark.slow
def test_the_kernels_compile_for_an_h100() -> None:
    """Triton brings NVIDIA's assembler, so that needs no GPU."""
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(helpers.ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
