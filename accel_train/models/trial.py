"""Running a model to see what it does, without leaving a trace in it or in the random generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_train.errors import UserError
from accel_train.launch.compat import TorchDispatchMode
from accel_train.launch.precision import without_tf32

SAMPLES = 4
GENERATORS = ("cuda", "xpu", "mps")  # devices with a random generator of their own


def different_images(channels: int, size: int) -> Tensor:
    """Random float32 images [4, channels, size, size] that differ in brightness and contrast.

    A mean over samples that are alike would differ little from a mean over half of them.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SAMPLES, channels, size, size, generator=generator)
    contrast, brightness = torch.rand(2, SAMPLES, channels, 1, 1, generator=generator)
    images: Tensor = noise * (4 * contrast + 0.2) + 4 * brightness - 2
    return images


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run `model` inside, as with `restored`. Inside, nothing hides what the model computes.

    Parameters that are all zero, as at the end of the branches of a new network, are 0.1, and matrix products are not
    rounded to TF32. Warnings are not shown.
    """
    zeros = [parameter for parameter in model.parameters() if not parameter.any()]
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.fill_(0.1)
        with without_tf32(), restored(model, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run `model` inside: afterwards its buffers, gradients and modes and all global random generators are as before.

    Inside, there are no gradients at first.
    """
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states, (python, numpy) = torch_states(device), (random.getstate(), np.random.get_state())
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                buffer.copy_(value)
                now = module._buffers.get(name)
                # A pass may have put another tensor there. One of another shape is a table that it keeps.
                if now is not None and now is not buffer and (now.shape, now.dtype) == (value.shape, value.dtype):
                    module._buffers[name] = buffer
        for module, training in modes:
            module.training = training  # not `train`, which changes children, too
        for parameter, gradient in gradients:
            parameter.grad = gradient
        torch.set_rng_state(states[0])
        if device.type in GENERATORS:
            torch.get_device_module(device).set_rng_state(states[1], *_number(device))
        random.setstate(python)
        np.random.set_state(numpy)


def torch_states(device: torch.device) -> list[Tensor]:
    """The states of torch's generators on the CPU and on `device`."""
    states = [torch.get_rng_state()]
    if device.type in GENERATORS:
        states.append(torch.get_device_module(device).get_rng_state(*_number(device)))
    return states


def _number(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of mps there is one


def other_states() -> tuple[Any, Any]:
    """The states of random and numpy.random, to compare."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"])


@dataclass
class Trace:
    """What was seen in a forward pass."""

    draws: dict[str, str] = field(default_factory=dict)
    """For each place, such as "head.drop (Dropout)": the operator that drew there from a global generator."""
    totals: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """Of each module's output, in order: the place, the number of elements, the sum of their magnitudes."""
    comparable: int | None = None
    """How many of the totals were computed before the first draw. None: all."""
    outputs: list[Tensor] = field(default_factory=list)
    """What the model returned."""


def trace_pass(model: nn.Module, images: Tensor) -> Trace:
    """Run the forward pass and watch the modules and the random generators."""
    trace, places = Trace(), ["the model"]
    names = {module: f"{name} ({class_name(module)})" for name, module in model.named_modules() if name}

    def enter(module: nn.Module, _: Any) -> None:
        places.append(names.get(module, "the model"))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        places.pop()
        place = names.get(module, "the model")
        trace.totals += [(place, values.numel(), values.abs().sum()) for values in float_tensors(output)]

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **(kwargs or {}))
            before = torch_states(images.device)
            result = func(*args, **(kwargs or {}))
            if not all(map(torch.equal, before, torch_states(images.device))):
                trace.draws.setdefault(places[-1], func.overloadpacket.__name__)
                trace.comparable = len(trace.totals) if trace.comparable is None else trace.comparable
            return result

    others = other_states()
    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        with Watch():  # type: ignore[no-untyped-call]
            trace.outputs = float_tensors(model(images))
    finally:
        for hook in hooks:
            hook.remove()
    for library, before, after in zip(("random", "numpy.random"), others, other_states(), strict=True):
        if before != after:
            trace.draws.setdefault("the model", library)
            trace.comparable = 0  # nobody knows where it was
    return trace


def class_name(module: nn.Module) -> str:
    """The class of a module as the model's author knows it: of a converted layer, the one that it had before."""
    own = f"{__package__}.batchnorm", f"{__package__}.dropout"
    return next(kind.__name__ for kind in type(module).__mro__ if not kind.__module__.startswith(own))


def float_tensors(output: Any) -> list[Tensor]:
    """The tensors of floats that a module returned, alone or in a tuple, list or dict."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.numel() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in float_tensors(part)]


def raise_unused_parameters_advice(error: Exception) -> None:
    """Raise UserError if `error` is DDP's for parameters that a pass has left out, unseen in the trial."""
    if "Expected to have finished reduction in the prior iteration" in str(error):
        raise UserError(
            "model: an update did not use some of the parameters, although the passes that were tried at the start "
            "used them all. Let each pass use all parameters, or give --bitwise true, which does not need that.",
            every_process=False,
        ) from error
