"""Tries a model before the run: is one pass over two virtual batches the same as two passes over one each?

Then any number of processes and any accumulation learn the same. Nobody can list what all models do, so the semantics
are tried, in training mode: losses and gradients of both ways are compared, with the random numbers that training uses.
If they differ, each forward pass has one virtual batch, whose random numbers are seeded.

The trial runs on copies, in float64, where rounding cannot be confused with a difference. The number of its images
follows from the operations of the model alone, so the verdict does not depend on the processes. The main process tries,
the others get its verdict, and a run keeps it.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from accel_train.compat import TorchDispatchMode, backward_pass
from accel_train.config.schema import Config
from accel_train.errors import first_of
from accel_train.keyed import restored_generators, seed_generators
from accel_train.launch.accelerator import without_tf32
from accel_train.launch.agreement import broadcast_from_main
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import KeyedFunctions, convert_dropout
from accel_train.models.verdict import Verdict, read_verdict, refuse_sync_batchnorm
from accel_train.models.wrapping import kept_buffers

GENERATORS = ("cuda", "xpu", "mps")  # devices with a random generator of their own
OPERATIONS = 5e8
"""Floating-point operations of a virtual batch's forward pass in the trial: less than a second for a small net."""
FEWEST, MOST = 2, 32  # images of a virtual batch in the trial
TOLERANCE = 1e-6
"""Relative; rounding in float64 gives at most some 1e-11."""
LARGER = 8
"""The second virtual batch's values are so many times as large as the first one's: what depends on them shows."""


def find_verdict(
    config: Config, accelerator: Accelerator, model: nn.Module, channels: int, size: int, *, resumes: bool
) -> Verdict:
    """Try `model`, in training, on its device and not wrapped, with images of `size` pixels;
    or read what the run has kept, if it `resumes`. Collective.

    Raises UserError if the model cannot be trained as `config` says.
    """
    refuse_sync_batchnorm(model)

    def decide() -> Verdict:
        kept = None
        if resumes and config.resume in ("auto", "must") and config.output_dir is not None:  # not from another run
            kept = read_verdict(config.output_dir)
        return kept or try_model(model, channels, size)

    verdict = broadcast_from_main(accelerator, decide)
    verdict.check(config, accelerator)
    return verdict


def try_model(model: nn.Module, channels: int, size: int) -> Verdict:
    """Try `model` with images of `size` pixels. Nothing is changed in it or in the random generators.

    It raises nothing that a model raises: one that cannot be tried has a verdict that says so.
    """
    with restored(model, next(model.parameters()).device), without_tf32(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            verdict = _try_in(torch.float64, model, channels, size)
            if verdict is None:  # it computes in float32, whatever its weights are
                verdict = _try_in(torch.float32, model, channels, size)
        except Exception as error:  # whatever a model does: training will show whether it is a mistake
            return Verdict(untried=(str(error).splitlines() or [type(error).__name__])[0])
    assert verdict is not None
    return verdict


def _try_in(kind: torch.dtype, model: nn.Module, channels: int, size: int) -> Verdict | None:
    """The verdict of a trial in this precision; None if the model does not take float64."""
    device = next(model.parameters()).device
    if device.type == "mps":
        device = torch.device("cpu")
    base = copy.deepcopy(model).to(device).eval()
    if kind == torch.float64:
        base = base.double()
    _prepare(base)
    try:
        count = _images_of_a_batch(copy.deepcopy(base), torch.ones(1, channels, size, size, device=device, dtype=kind))
    except Exception:
        if kind == torch.float64:
            return None
        raise
    images = different_images(channels, size, 2 * count).to(device, kind)
    images[1 : 3 * count // 4] = images[:1] + 0.01 * images[1 : 3 * count // 4]  # alike: one expert gets them all
    images[count:] *= LARGER
    return _verdict(base, images, count)


def _images_of_a_batch(model: nn.Module, image: Tensor) -> int:
    """How many images a virtual batch of the trial has: a power of two. It follows from the operations alone.

    `model`: a copy. It gets no gradients any more: the counter would look for those of a parameter that is given to a
    layer as its input, as a class token may be, and without a graph there are none.
    """
    model.requires_grad_(False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    count = MOST
    while count > FEWEST and count * counter.get_total_flops() > OPERATIONS:
        count //= 2
    return count


@torch.no_grad()
def _prepare(model: nn.Module) -> None:
    """Change the weights of a copy, so that nothing hides what it computes, and let it compute on its own.

    Parameters that are all zero, as at the end of the branches of a new network, are 0.1. Of the others each row
    changes a little, as by an update: a buffer may follow the weights, as the vectors of spectral_norm do.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.any():
            rows = (*parameter.shape[:1], *(1 for _ in parameter.shape[1:]))
            parameter.mul_(torch.rand(rows, generator=generator).mul_(0.2).add_(0.9).to(parameter.device))
        else:
            parameter.fill_(0.1)


def _verdict(base: nn.Module, images: Tensor, count: int) -> Verdict:
    """Compare both ways for a model `base`, which is not changed; `count`: images of a virtual batch."""
    together, functions = "", False
    ways: _Ways | None = None
    try:
        ways = _Ways(base, images, count)
        if ways.first.draws:
            functions = True
            ways = _Ways(base, images, count, functions=True)
        together = ways.difference()
    except Exception as error:  # the layers of training do not fit the model: it may run without them
        together = f"it fails otherwise ({(str(error).splitlines() or [type(error).__name__])[0]})"
    if together or ways is None:
        functions = False
        ways = _Ways(base, images, count, keyed=False)
    half = count // 2  # fewer images are enough for an evaluation
    return Verdict(
        together=together,
        functions=functions,
        state=ways.has_state(),
        initialised=ways.initialised(base),
        changing=ways.changing(),
        evaluation=_is_coupled_in_evaluation(ways.alone, images[count - half : count + half], half),
        leaves_out=ways.leaves_out(),
    )


@dataclass
class _Pass:
    """What was seen in one pass."""

    samples: int
    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of each sample."""
    draws: dict[str, str] = field(default_factory=dict)
    """For each place, such as "head.drop (Dropout)": the operator that drew there from a global generator."""
    reads: bool = False
    """Whether a value of a tensor, or a shape that follows from values, may have decided in Python what is computed."""
    rows: list[list[int]] = field(default_factory=list)
    """Of each BatchNorm: how many rows of values each of its calls had."""
    leaves_out: bool = False
    """Whether a parameter got no gradient."""
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _Copy:
    """A copy of a model with the layers that training has."""

    def __init__(self, base: nn.Module, count: int, *, keyed: bool, functions: bool) -> None:
        self.model = copy.deepcopy(base).train()
        self.batches = VirtualBatches(self.model, count)
        self.batch_norms: list[Any] = self.batches.modules
        self.keys = convert_dropout(self.model if keyed else nn.Module(), 0)
        self.keys.rate_of_check = 0.5  # a mask that drops little hides errors
        self.around = KeyedFunctions(self.keys) if functions else nullcontext()
        self.names = {module: f"{name} ({class_name(module)})" for name, module in self.model.named_modules() if name}
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]

    def run(self, images: Tensor, first: int, seed: int) -> _Pass:
        """A pass of training over `images`, whose samples are numbered from `first`."""
        torch.manual_seed(seed)  # of all devices
        seed_generators(seed)
        self.keys.set_samples(torch.arange(first, first + len(images)), 0, images.device)
        self.batches.begin(torch.ones(len(images), device=images.device), padded=False)
        seen = _Pass(len(images))
        with _watched(self.model, seen, self.names, self.batch_norms, images.device):
            with self.around:
                output = self.model(images)
            seen.losses = _losses(output, len(images))
            seen.losses.sum().backward()  # type: ignore[no-untyped-call]
        self.batches.discard()
        seen.losses = seen.losses.detach()
        seen.leaves_out = any(each.grad is None for each in self.parameters)
        named = self.model.named_buffers(remove_duplicate=False)
        seen.buffers = {name: buffer.detach().clone() for name, buffer in named}
        return seen

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of the last pass, which are None from then on."""
        gradients = [each.grad for each in self.parameters]
        for each in self.parameters:
            each.grad = None
        return gradients


def _losses(output: Any, samples: int) -> Tensor:
    """A loss of each sample, float [samples], to which all logits contribute."""
    logits = [each.flatten(1) for each in float_tensors(getattr(output, "logits", output)) if len(each) == samples]
    values = torch.cat(logits, 1)
    weights = torch.arange(values.shape[1], device=values.device).to(values).cos()
    return (values * weights + 0.5 * values.square()).sum(1)


class _Ways:
    """One pass over two virtual batches, and two passes over one each."""

    def __init__(
        self,
        base: nn.Module,
        images: Tensor,
        count: int,
        *,
        keyed: bool = True,
        functions: bool = False,
    ) -> None:
        kinds: Mapping[str, Any] = {"keyed": keyed, "functions": functions}
        self.alone = _Copy(base, count, **kinds)
        self.first = self.alone.run(images[:count], 0, 0)
        if self.first.draws and keyed and not functions:
            return  # another way will be tried
        self.whole = _Copy(base, count, **kinds)
        self.both = self.whole.run(images, 0, 0)
        gradients = self.alone.take_gradients()
        self.second = self.alone.run(images[count:], count, 1)
        pairs = zip(gradients, self.alone.take_gradients(), strict=True)
        self.gradients = [other if one is None else one if other is None else one.add_(other) for one, other in pairs]
        self.again = self.alone.run(images[:count], 0, 0)
        self.rounding: tuple[Tensor, float] | None = None
        if images.dtype != torch.float64:  # what one rounding of the images changes
            moved = _Copy(base, count, **kinds)
            losses = moved.run(images * (1 + 2**-23), 0, 0).losses
            both = zip(moved.parameters, self.whole.parameters, strict=True)
            changes = [
                float((one.grad - other.grad).to_dense().abs().max())
                for one, other in both
                if one.grad is not None and other.grad is not None
            ]
            self.rounding = (losses - self.both.losses).abs().max(), max(changes, default=0.0)

    @property
    def draws(self) -> dict[str, str]:
        return self.both.draws | self.first.draws | self.second.draws

    def difference(self) -> str:
        """What is different, and in which module; "" if nothing is."""
        if self.draws:
            places = [f"{operator} in {place}" for place, operator in self.draws.items()]
            return f"draws random numbers for all samples together: {first_of(places)}"
        if uneven := self._uneven():
            return f"{uneven} normalises together values of all samples, but not as many for each"
        parts = torch.cat([self.first.losses, self.second.losses])
        differs = not self._is_close(self.both.losses, parts, parts.abs())
        name = self._different_gradient()
        if not differs and not name:
            return ""
        if differs:
            return "the output of the model for a sample depends on the other samples"
        return f"the gradient of {name} depends on which samples are computed together"

    def _is_close(self, one: Tensor, other: Tensor, size: Tensor | float, floor: float = 0.0) -> bool:
        limit = TOLERANCE * size + floor
        if self.rounding is not None:
            limit = limit + 16 * float(self.rounding[0] if one is self.both.losses else self.rounding[1])
            limit = limit + 1e-5 * size + 1e4 * floor
        excess = float((one - other).abs().sub_(limit).max())
        return excess <= 0 or not math.isfinite(excess)

    def _different_gradient(self) -> str:
        """The name of a parameter whose gradients are different."""
        pairs = list(zip(self.whole.parameters, self.gradients, strict=True))
        sizes = [0.0 if other is None or not other.numel() else _largest(other) for _, other in pairs]
        largest = max(sizes, default=0.0)
        names = [name for name, each in self.whole.model.named_parameters() if each.requires_grad]
        for name, (parameter, other), size in zip(names, pairs, sizes, strict=True):
            if not parameter.numel() or (parameter.grad is None and other is None):
                continue
            one = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            other = torch.zeros_like(parameter) if other is None else other.to_dense()
            # A gradient that is zero but for rounding is compared with the largest one.
            if not self._is_close(one, other, size, 1e-9 * largest):
                return name
        return ""

    def has_state(self) -> bool:
        """Whether the first batch after the second is not what it was before."""
        one, other = self.first.losses, self.again.losses
        if one.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            return not _is_same(one, other)
        return not self._is_close(one, other, one.abs(), 1e-6 * float(one.abs().max()))

    def initialised(self, base: nn.Module) -> str:
        """The name of a parameter that the passes have changed, though there was no update."""
        before = dict(base.named_parameters())
        for name, parameter in self.alone.model.named_parameters():
            if name not in before or not _is_same(before[name], parameter):
                return name
        return ""

    def changing(self) -> tuple[str, ...]:
        """The buffers that depend on the samples of a pass, or on the number of passes: not a table that the first pass
        has made, nor one for the number of samples."""
        passes = (self.first, self.second, self.again, self.both)
        found = []
        for module_name, module in self.alone.model.named_modules():
            for own in module._buffers:
                place = f"{module_name}.{own}".strip(".")
                first, *others = [each.buffers.get(place) for each in passes]
                if first is not None and not all(
                    other is None or other.shape != first.shape or _is_same(first, other) for other in others
                ):
                    found.append(f"{place} ({class_name(module)})")
        return tuple(found)

    def leaves_out(self) -> bool:
        """Whether a pass may leave out parameters, as stochastic depth that skips blocks, or experts."""
        passes = (self.first, self.second, self.again, self.both)
        chosen = any(each.reads or {"random", "numpy.random"} & set(each.draws.values()) for each in passes)
        return chosen or any(each.leaves_out for each in passes)

    def _uneven(self) -> str:
        """A BatchNorm that does not normalise a whole number of values for each sample, as of learned prototypes."""
        for number, module in enumerate(self.alone.batch_norms):
            if not _is_of_samples((self.first, self.both), number):
                return self.alone.names.get(module, "the model")
        return ""


@contextmanager
def _watched(
    model: nn.Module,
    seen: _Pass,
    names: Mapping[nn.Module, str],
    batch_norms: Sequence[nn.Module],
    device: torch.device,
) -> Iterator[None]:
    """Inside, write to `seen` what a forward pass and its backward pass do."""
    places, others = ["the model"], other_states()
    rows: dict[nn.Module, list[int]] = {module: [] for module in batch_norms}

    def enter(module: nn.Module, _: Any) -> None:
        places.append(names.get(module, "the model"))

    def leave(module: nn.Module, _: Any, output: Any) -> None:
        if len(places) > 1:
            places.pop()
        if module in rows and backward_pass() is None:
            rows[module].append(len(output))

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _may_decide(func, args):
                seen.reads = True
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **(kwargs or {}))
            before = torch_states(device)
            result = func(*args, **(kwargs or {}))
            if not all(map(torch.equal, before, torch_states(device))):
                seen.draws.setdefault(places[-1], func.overloadpacket.__name__)
            return result

    hooks = [module.register_forward_pre_hook(enter) for module in model.modules()]
    hooks += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        with Watch():  # type: ignore[no-untyped-call]
            yield
    finally:
        for hook in hooks:
            hook.remove()
    for library, before, after in zip(("random", "numpy.random"), others, other_states(), strict=True):
        if before != after:
            seen.draws.setdefault("the model", library)
    seen.rows = list(rows.values())


def _may_decide(operator: Any, arguments: Sequence[Any]) -> bool:
    """Whether a value becomes a number, or a shape that Python may read, as that of `nonzero`."""
    if operator is torch.ops.aten.index.Tensor:  # by a mask, not by numbers
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])
    reads = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
    return operator in reads or torch.Tag.dynamic_output_shape in operator.tags


def _is_coupled_in_evaluation(way: _Copy, images: Tensor, count: int) -> bool:
    """Whether in evaluation the output for a sample depends on the others of its batch, or on random numbers.

    `count`: half of the `images`. The copy is changed.
    """
    if not all(module.track_running_stats for module in way.batch_norms):
        return True
    model, losses = way.model.eval(), []
    for part in (slice(None), slice(count), slice(count, None)):
        torch.manual_seed(0)
        seed_generators(0)
        seen = _Pass(len(images[part]))
        with _watched(model, seen, way.names, [], images.device), torch.no_grad():
            losses.append(_losses(model(images[part]), seen.samples))
        if seen.draws:
            return True
    tolerance = TOLERANCE if images.dtype == torch.float64 else 1e-3
    parts = torch.cat(losses[1:])
    same = (losses[0] - parts).abs() <= tolerance * parts.abs() + 1e-12 * parts.abs().max()
    return not bool(same.all() | ~(losses[0] + parts).isfinite().all())


def _is_of_samples(passes: Sequence[_Pass], number: int) -> bool:
    """Whether a BatchNorm normalises the same number of rows for each sample, in all passes that call it."""
    called = [(each.samples, each.rows[number]) for each in passes if each.rows[number]]
    shares = [{row / samples for row in rows} for samples, rows in called]
    if len({len(rows) for _, rows in called}) == 1 and any(share != shares[0] for share in shares):
        return False
    return all(share == int(share) for part in shares for share in part) and (
        not shares or bool(set.intersection(*shares))
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _largest(values: Tensor) -> float:
    """Without another tensor of the size of `values`, which may be most of a model's memory."""
    return float(torch.linalg.vector_norm(values.to_dense(), math.inf))


def different_images(channels: int, size: int, count: int = 4) -> Tensor:
    """Random float32 images [count, channels, size, size] that differ in brightness and contrast.

    A mean over samples that are alike would differ little from a mean over half of them.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, channels, size, size, generator=generator)
    contrast, brightness = torch.rand(2, count, channels, 1, 1, generator=generator)
    images: Tensor = noise * (4 * contrast + 0.2) + 4 * brightness - 2
    return images


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run `model` inside: afterwards its buffers, gradients and modes and all global random generators are as before.

    Inside, there are no gradients at first.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = torch_states(device)
    try:
        with kept_buffers(model), restored_generators():
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for module, training in modes:
            module.training = training  # not `train`, which changes children, too
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if device.type in GENERATORS:
            torch.get_device_module(device).set_rng_state(states[1], *_number(device))


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
