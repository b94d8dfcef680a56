"""Finds out, before a run, what the forward passes of training change in a model, and what they leave out.

A buffer that each pass changes belongs to one process: each counts its own passes, of its own samples. DDP waits for
the gradients of all parameters, unless it knows that a pass may leave some out. And the running statistics of a
BatchNorm depend on how often a pass calls it, and on whose values it normalises.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.errors import UserError, first_of
from accel_train.launch.compat import TorchDispatchMode
from accel_train.models.trial import other_states, restored


@dataclass(frozen=True)
class TrainingPass:
    """What `try_training` found."""

    changing: tuple[str, ...] = ()
    """The buffers that each pass changes, such as "norm.running_mean (InstanceNorm2d)"."""
    leaves_out: bool = False
    """Whether a pass may leave out parameters. It was only looked for if asked for."""
    irregular: bool = False
    """Whether there is a BatchNorm that a pass does not call exactly once, or whose values are not its samples'."""
    of_no_sample: tuple[int, ...] = ()
    """The numbers of the BatchNorms that normalise the same number of values for any number of samples."""
    uneven: tuple[str, ...] = ()
    """The BatchNorms that normalise neither these nor a whole number of values for each sample."""

    def warnings(self, *, bitwise: bool) -> tuple[str, ...]:
        """What depends on the number of processes, for the user; with --bitwise a pass has always one virtual batch."""
        found = []
        if self.changing:
            found.append(
                f"model: each forward pass of training changes the buffer {first_of(self.changing, 1)}. Each process "
                "does so by its own samples, and the main process's values are kept. So the result depends on the "
                "number of processes. To avoid that, choose another model or normalisation."
            )
        if self.uneven and not bitwise:
            found.append(
                f"model: {first_of(self.uneven, 1)} normalises together values of all samples of a micro-batch, but "
                "not as many for each sample. So the result depends on the number of processes. To avoid that, choose "
                "another model or normalisation, or --bitwise true."
            )
        return tuple(found)

    def prepare_ddp(self, accelerator: Accelerator) -> None:
        """Set what DDP has to know of the model. Call it before `Accelerator.prepare`."""
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = self.leaves_out
            # Processes with different buffers would not go on in the same way after a restart: all use the main's.
            accelerator.ddp_handler.broadcast_buffers = bool(self.changing)


def of_all_sizes(passes: Sequence[TrainingPass]) -> TrainingPass:
    """What is found in passes with images of several sizes. Raises UserError if one layer's statistics are counted in
    different ways."""
    if len({each.of_no_sample for each in passes}) > 1:
        raise UserError(
            "--model.progressive-sizes: a BatchNorm of the model normalises values of its samples at some of the sizes "
            "only. Train this model at one size."
        )
    return TrainingPass(
        tuple(dict.fromkeys(place for each in passes for place in each.changing)),
        any(each.leaves_out for each in passes),
        any(each.irregular for each in passes),
        passes[0].of_no_sample,
        tuple(dict.fromkeys(place for each in passes for place in each.uneven)),
    )


def try_training(model: nn.Module, images: Tensor, batch_norms: Sequence[Any], *, gradients: bool) -> TrainingPass:
    """Try `model`, which is in training and not wrapped yet, with half of the `images`, again, with all of them, and
    with larger values.

    `batch_norms`: those whose statistics something else takes care of; they are tried in evaluation mode. `gradients`:
    look for parameters that a pass leaves out. Nothing is changed, and nothing is raised: in a model that cannot be
    tried nothing was found.
    """
    half, taken_care_of = images[: len(images) // 2], {id(each) for norm in batch_norms for each in norm.buffers()}
    has_buffers = any(id(buffer) not in taken_care_of for buffer in model.buffers())
    repeats = gradients or has_buffers
    if not batch_norms and not repeats:
        return TrainingPass()
    try:
        with warnings.catch_warnings(), ExitStack() as resources:
            warnings.simplefilter("ignore")
            if has_buffers:
                resources.enter_context(_other_weights(model, images.device))
            with restored(model, images.device):
                passes = [_run(model, half, batch_norms, gradients=gradients) for _ in range(1 + repeats)]
            with restored(model, images.device):
                passes.append(_run(model, images, batch_norms, gradients=False))
            with restored(model, images.device):  # for a buffer that keeps only the largest value, for example
                larger = _run(model, 8 * images[len(images) // 2 :], batch_norms, gradients=False)
    except Exception:  # whatever a model does: training will show whether it is a mistake
        return TrainingPass()
    places = {f"{name}.{own}".strip("."): module for name, module in model.named_modules() for own in module._buffers}
    names = {module: f"{name} ({type(module).__name__})" for name, module in model.named_modules()}
    others = [number for number in range(len(batch_norms)) if not _is_of_samples(passes, number)]
    # The same number of rows in all passes: learned prototypes, for example.
    of_no_sample = [number for number in others if len({tuple(each.rows[number]) for each in passes}) == 1]
    return TrainingPass(
        changing=tuple(
            f"{place} ({type(module).__name__})"
            for place, module in places.items()
            # Those of SyncBatchNorm are the same on all processes: docs/guarantees.md says how far.
            if _is_changing(place, [*passes, larger]) and not isinstance(module, nn.SyncBatchNorm)
        ),
        leaves_out=gradients and any(each.leaves_out for each in passes),
        irregular=bool(others) or any(len(rows) != 1 for each in passes for rows in each.rows),
        of_no_sample=tuple(of_no_sample),
        uneven=tuple(names[batch_norms[number]] for number in others if number not in of_no_sample),
    )


@dataclass
class _Pass:
    """What was seen in one forward pass."""

    samples: int
    rows: list[list[int]]
    """Of each BatchNorm: how many rows of values each of its calls had."""
    buffers: dict[str, Tensor]
    """Afterwards."""
    leaves_out: bool


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a value of a tensor is read in Python, which may then decide what is computed."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
            self.seen = True
        return func(*args, **(kwargs or {}))


@contextmanager
def _other_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the weights are other ones, as after some updates. A buffer may follow the weights, as the vectors of
    spectral_norm do, which a new model has brought to their end already."""
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    try:
        with torch.no_grad(), restored(model, device):
            for parameter, _ in weights:
                parameter.mul_(0.9 + 0.2 * torch.rand_like(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in weights:
                parameter.copy_(weight)


def _run(model: nn.Module, images: Tensor, batch_norms: Sequence[Any], *, gradients: bool) -> _Pass:
    """Run a forward pass of training, and with `gradients` the backward pass."""
    rows: dict[Any, list[int]] = {module: [] for module in batch_norms}

    def record(module: nn.Module, _: Any, output: Tensor) -> None:
        rows[module].append(len(output))

    hooks = [module.register_forward_hook(record) for module in batch_norms]
    drawn, reads = other_states(), _HostReads()  # type: ignore[no-untyped-call]
    try:
        for module in batch_norms:
            module.eval()
        with reads, torch.set_grad_enabled(gradients):
            output = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    leaves_out = reads.seen or drawn != other_states()  # as stochastic depth that skips blocks, or experts
    if gradients:
        output.float().square().sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        leaves_out = leaves_out or any(parameter.grad is None for parameter in trained)
        for parameter in trained:
            parameter.grad = None
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
    return _Pass(len(images), list(rows.values()), buffers, leaves_out)


def _is_changing(place: str, passes: Sequence[_Pass]) -> bool:
    """Whether a buffer depends on the samples of a pass, or on the number of passes: not a table that the first pass
    has made, nor one for the number of samples."""
    first, *others = [each.buffers.get(place) for each in passes]
    return first is not None and any(
        other is not None
        and other.shape == first.shape
        and not ((first == other) | (first.isnan() & other.isnan())).all()
        for other in others
    )


def _is_of_samples(passes: Sequence[_Pass], number: int) -> bool:
    """Whether a BatchNorm normalises the same number of rows for each sample, in all passes that call it."""
    called = [(each.samples, each.rows[number]) for each in passes if each.rows[number]]
    shares = [{row / samples for row in rows} for samples, rows in called]
    if len({len(rows) for _, rows in called}) == 1 and any(share != shares[0] for share in shares):
        return False
    return all(share == int(share) for part in shares for share in part) and (
        not shares or bool(set.intersection(*shares))
    )
