"""Finds out, before a run, whether what a model computes for a sample depends on how the batch is divided.

Such a model learns something else on another number of processes. Nobody can list all layers of all libraries, so the
model is tried with a few samples: does it draw from a global random generator, and does the whole batch give what its
halves give?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.launch.consensus import broadcast_from_main
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout
from accel_train.models.training_pass import try_training
from accel_train.models.trial import SAMPLES, different_images, other_states, torch_states, unchanged

TOLERANCE = 1e-4
"""Relative. Kernels round differently for other batch sizes, which changes at most some 1e-6 in 30 models."""


@dataclass(frozen=True)
class Independence:
    """What `check_independence` found."""

    needs_functions: bool
    """Whether the model must run inside `KeyedFunctions` in training."""
    warnings: tuple[str, ...]
    """What still depends on the number of processes, for the user."""


@dataclass
class _Trace:
    """What was seen in a forward pass."""

    draws: dict[str, str] = field(default_factory=dict)
    """For each place, such as "head.drop (Dropout)": the operator that drew there from a global generator."""
    totals: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """Of each module's output, in order: the place, the number of elements, the sum of their magnitudes."""
    comparable: int | None = None
    """How many of the totals were computed before the first draw. None: all."""
    outputs: list[Tensor] = field(default_factory=list)
    """What the model returned."""


def make_independent(
    config: Config, accelerator: Accelerator, model: nn.Module, channels: int, size: int, virtual_batch: int
) -> tuple[VirtualBatches, DropoutKeys, Independence]:
    """Convert the layers of `model` that mix samples or draw random numbers, in place, so that what it computes for a
    sample does not depend on the number of processes; and check that nothing else does. Raises UserError if --bitwise
    is not possible."""
    in_update = config.batch_size // virtual_batch if config.bitwise else None
    virtual_batches = VirtualBatches(model, virtual_batch, in_update)
    dropout, modules = convert_dropout(model, config.seed), virtual_batches.modules
    parameter = next(model.parameters())
    tried = check_independence(
        model,
        channels,
        size,
        parameter.device,
        dropout,
        batch_norms=modules,
        recomputes=config.model.gradient_checkpointing,
    )
    by_ddp = accelerator.num_processes > 1 and not accelerator.is_fsdp2 and not config.bitwise  # gradients are summed
    images = different_images(channels, size).to(parameter)
    passes = try_training(model, images, modules, gradients=by_ddp)
    # All processes must do the same, even if the trial rounded otherwise on another kind of device.
    independence, passes = broadcast_from_main(accelerator, lambda: (tried, passes))
    independence = replace(independence, warnings=(*independence.warnings, *passes.warnings(bitwise=config.bitwise)))
    if config.bitwise and independence.warnings:
        raise UserError(f"--bitwise: {independence.warnings[0]}")
    virtual_batches.set_calls(irregular=passes.irregular, of_no_sample=passes.of_no_sample)
    passes.prepare_ddp(accelerator)
    return virtual_batches, dropout, independence


def check_independence(
    model: nn.Module,
    channels: int,
    size: int,
    device: torch.device,
    keys: DropoutKeys,
    *,
    batch_norms: Sequence[nn.Module] = (),
    recomputes: bool = False,
) -> Independence:
    """Try `model` on the device, in the mode (training) that it is in, with 4 random images of `size` x `size` pixels.

    `keys`: what `convert_dropout(model)` returned. `batch_norms`: modules that something else takes care of; they are
    tried in evaluation mode. `recomputes`: the model uses gradient checkpointing. Call it before the model is wrapped.
    Layers whose masks cannot be repeated in gradient checkpointing are released from `keys`. Besides, nothing is
    changed: buffers, gradients, random generators. It raises nothing: a model that cannot be tried is a warning.
    """
    functions = False
    try:
        with unchanged(model, device), _checked(keys, batch_norms):
            images = different_images(channels, size).to(device, next(model.parameters()).dtype)
            released = _release_unrepeatable(model, images, keys) if recomputes else []
            draws, coupled = _dependencies(model, images, keys, nullcontext())
            # A function that gradient checkpointing calls again would not be redirected then.
            if draws and not recomputes:
                others, coupled = _dependencies(model, images, keys, KeyedFunctions(keys))
                functions, draws = others != draws, others
    except Exception as error:  # whatever a model does: training will show whether it is a mistake
        line = (str(error).splitlines() or [type(error).__name__])[0]
        return Independence(
            False, (f"model: could not check whether a sample depends on the others of its micro-batch ({line})",)
        )
    found = []
    if released:
        found.append(
            f"model.gradient_checkpointing: {_first(released)}: called in several checkpointed parts of the model, so "
            "its dropout masks depend on the number of processes. Set it to false to avoid that."
        )
    operators = [f"{operator} in {place}" for place, operator in draws.items() if place not in released]
    if operators:
        found.append(
            "model: draws random numbers that depend on the number of processes: "
            f"{_first(operators)}. Their distribution is correct, but with another number of processes the numbers are "
            "different. To avoid that, set the rate to 0 or choose another model."
        )
    if coupled:
        found.append(
            f"model: the output of {coupled} for a sample depends on the other samples of its micro-batch. So the "
            "result depends on the number of processes. To avoid that, choose another model or normalisation."
        )
    return Independence(functions, tuple(found))


def _first(places: Sequence[str]) -> str:
    """The first three of a list, and how many more there are."""
    return ", ".join(places[:3]) + (f" and {len(places) - 3} others" if len(places) > 3 else "")


@contextmanager
def _checked(keys: DropoutKeys, batch_norms: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, masks drop half of their elements, because one that drops little hides errors."""
    for module in batch_norms:
        module.eval()
    keys.rate_of_check = 0.5
    try:
        yield
    finally:
        keys.rate_of_check = None
        keys.clear()


def _dependencies(
    model: nn.Module, images: Tensor, keys: DropoutKeys, context: AbstractContextManager[Any]
) -> tuple[dict[str, str], str | None]:
    """The draws from global generators, and the first module whose output for a batch is not that for its halves."""
    ids = torch.arange(SAMPLES, device=images.device)
    traces = []
    for part in (slice(None), slice(SAMPLES // 2), slice(SAMPLES // 2, None)):
        keys.set_samples(ids[part], 0)
        with context, torch.no_grad():
            traces.append(_trace(model, images[part]))
    whole, *halves = traces
    compared = min((trace.comparable for trace in traces if trace.comparable is not None), default=len(whole.totals))
    coupled = None
    for total, *parts in list(zip(whole.totals, *(half.totals for half in halves), strict=False))[:compared]:
        if not _adds_up(total, parts):
            coupled = total[0]
            break
    if coupled is None and not whole.draws:
        joined = (torch.cat(outputs) for outputs in zip(*(half.outputs for half in halves), strict=True))
        same = [
            _close(one, other) for one, other in zip(whole.outputs, joined, strict=True) if one.shape == other.shape
        ]
        coupled = None if all(same) else "the model"
    return whole.draws, coupled


def _adds_up(total: tuple[str, int, Tensor], parts: Sequence[tuple[str, int, Tensor]]) -> bool:
    """Whether the output of a batch has the sum of magnitudes of its halves' outputs."""
    place, count, value = total
    if any(part[0] != place for part in parts):
        return False  # another module was called
    if count == sum(part[1] for part in parts):
        return _close(value, sum((part[2] for part in parts), torch.zeros_like(value)))
    return count != parts[0][1] or _close(value, parts[0][2])  # the same for any batch, such as a table of positions


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree up to rounding, relative to the largest value. Values that are not finite agree."""
    difference = (one - other).abs().max() <= TOLERANCE * one.abs().max()
    return bool(difference | ~one.isfinite().all())


def _trace(model: nn.Module, images: Tensor) -> _Trace:
    """Run the forward pass and watch the modules and the random generators."""
    trace, places = _Trace(), ["the model"]
    names = {module: f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name}

    def enter(module: nn.Module, _: Any) -> None:
        places.append(names.get(module, "the model"))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        places.pop()
        place = names.get(module, "the model")
        trace.totals += [(place, values.numel(), values.abs().sum()) for values in _tensors(output)]

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
            trace.outputs = _tensors(model(images))
    finally:
        for hook in hooks:
            hook.remove()
    for library, before, after in zip(("random", "numpy.random"), others, other_states(), strict=True):
        if before != after:
            trace.draws.setdefault("the model", library)
            trace.comparable = 0  # nobody knows where it was
    return trace


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of floats that a module returned, alone or in a tuple, list or dict."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.numel() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _release_unrepeatable(model: nn.Module, images: Tensor, keys: DropoutKeys) -> list[str]:
    """Run a backward pass, and release the layers that do not have the same masks when checkpointing calls them again.

    That can only be a layer that several checkpointed segments share. torch restores its own generators for a segment,
    so a released layer repeats its masks. Returns the places of such layers.
    """
    layers: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if getattr(module, "keys", None) is keys
    }
    calls: list[tuple[nn.Module, list[Tensor]]] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.append((module, [values.detach().abs().sum() for values in (*_tensors(inputs), *_tensors(output))]))

    keys.set_samples(torch.arange(SAMPLES, device=images.device), 0)
    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.enable_grad():
            outputs = _tensors(model(images.clone().requires_grad_()))
            first = len(calls)
            torch.stack([output.float().square().sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    released = []
    for layer, sums in calls[first:]:
        name, before = layers[layer], [others for module, others in calls[:first] if module is layer]
        row = keys.layers.index(name)
        if row not in keys.released and not any(all(map(torch.isclose, sums, others)) for others in before):
            keys.released.add(row)
            released.append(f"{name} ({type(layer).__name__})")
    return released
