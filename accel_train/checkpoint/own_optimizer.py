"""A user's own optimizer (`--optim.name FILE.py:FUNCTION`), and its trial before the run.

No interface says what an optimizer keeps where. So copies of it take three steps with gradients of 1 and less, the
third one after a checkpoint's state was saved and loaded: it must have the bits of one without.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.checkpoint.state import (
    broadcast_optimizer_state,
    gather_to_main,
    matching_state,
    optimizer_state,
    outline,
    parameter_names,
)
from accel_train.config.schema import Optim
from accel_train.errors import UserError, reason_of
from accel_train.models.trial import restored
from accel_train.user_code import Reference, load, parse_reference, showing_user_lines

Groups = list[dict[str, Any]]
Make = Callable[[Groups], torch.optim.Optimizer]


def with_own_optimizer(optim: Optim, accelerator: Accelerator, model: nn.Module, prepared: Any) -> Any:
    """The optimizer to train with: the user's own, prepared by Accelerate, or `prepared` if optim.name is no code.

    `prepared`: what holds the parameter groups of `model` (wrapped, or split by FSDP2). Collective. Raises UserError
    if the user's optimizer cannot be trained with, saved and resumed.
    """
    reference = parse_reference("optim.name", optim.name)
    if reference is None:
        return prepared
    make = _maker(optim, reference)
    names = parameter_names(model, prepared.optimizer)
    groups = [
        {key: value for key, value in group.items() if key in ("params", "lr", "weight_decay", "lr_scale")}
        for group in prepared.param_groups
    ]
    with restored(model, accelerator.device):
        obstacle = _obstacle(make, groups, names, is_main=accelerator.is_main_process)
    for found in gather_object([obstacle]):  # a process of FSDP2 has its own parts of the parameters
        if found:
            raise UserError(f"--optim.name {reference.short}: {found}")
    return accelerator.prepare_optimizer(make(groups))


def _maker(optim: Optim, reference: Reference) -> Make:
    function, arguments = load("optim.name", reference), json.loads(optim.kwargs or "{}")

    def make(groups: Groups) -> torch.optim.Optimizer:
        with showing_user_lines("optim.name", reference):
            made = function([dict(group) for group in groups], **arguments)
        if mistake := _mistake(made, groups):
            raise UserError(f"--optim.name {reference.short}: {mistake}")
        return made  # type: ignore[no-any-return]

    return make


def _mistake(made: Any, groups: Groups) -> str:
    """What is wrong with what the user's function has returned for `groups`; "" if nothing is."""
    kind = type(made).__name__
    if not isinstance(made, torch.optim.Optimizer):
        return f"returned an object of type {kind}; expected a torch.optim.Optimizer."
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        return f"{kind} computes the loss several times in a step (a closure), which this trainer does not do."
    if callable(getattr(made, "train", None)) and callable(getattr(made, "eval", None)):
        return f"{kind} must be switched between training and evaluation (train, eval), which this trainer does not do."
    given = [id(parameter) for group in groups for parameter in group["params"]]
    taken = [id(parameter) for group in made.param_groups for parameter in group["params"]]
    if sorted(given) != sorted(taken):
        return f"{kind} has {len(taken)} parameters; expected the {len(given)} of the groups, each one once."
    if any("lr" not in group for group in made.param_groups):
        return f"{kind} has a group of parameters without 'lr', which the schedule sets."
    if any("lr_scale" in group for group in groups) and not any("lr_scale" in group for group in made.param_groups):
        return "its groups have lost 'lr_scale', that is --optim.head-lr or layer-decay; hand on the groups' settings."
    return ""


def _obstacle(make: Make, groups: Groups, names: Sequence[str], *, is_main: bool) -> str:
    """Why the optimizer that `make` makes for copies of `groups` cannot be trained with; "" if it can. Collective."""
    copies = _copied(groups)
    optimizer = make(copies)
    try:
        for number in range(2):
            _step(optimizer, number)
    except UserError:
        raise
    except Exception as error:
        return f"a step failed: {reason_of(error, 200)}."
    for name, before, group, after in _pairs(names, groups, copies):
        if group["lr"] and _local(before).numel() and torch.equal(_local(before), _local(after)):
            return f"two steps with gradients did not change {name}, with a learning rate of {group['lr']:g}."
    later = _copied(copies)
    other = make(later)
    try:
        _move_state(optimizer, other, is_main=is_main)
        for each in (optimizer, other):
            _step(each, 2)
    except Exception as error:
        return f"its state cannot be saved and loaded, so that no run could go on: {reason_of(error, 200)}."
    for name, before, _, after in _pairs(names, copies, later):
        if not torch.equal(_local(before), _local(after)):
            return (
                "a run that goes on would not be the same: after its state was saved and loaded, a step makes "
                f"something else of {name}. Its state_dict() must have all that a step depends on."
            )
    return ""


def _copied(groups: Groups) -> Groups:
    """Groups of new parameters with the same values, and the learning rate that the run begins with."""
    made = []
    for group in groups:
        params = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        made.append({**group, "params": params, "lr": group["lr"] * group.get("lr_scale", 1.0)})
    return made


def _step(optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = _gradient(parameter, number)
    optimizer.step()


def _gradient(parameter: nn.Parameter, number: int) -> Tensor:
    """Numbers from -1 to 1, other ones for each step, and the same for each copy of `parameter`."""
    local = _local(parameter.detach())
    values = torch.cos(torch.arange(local.numel(), device=local.device, dtype=torch.float32) + number)
    made = torch.empty_like(local).copy_(values.view(local.shape))
    if not isinstance(parameter, DTensor):
        return made
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _pairs(names: Sequence[str], one: Groups, other: Groups) -> list[tuple[str, Tensor, dict[str, Any], Tensor]]:
    """(name, parameter of `one`, group of `other`, its parameter) of each parameter."""
    first = [parameter.detach() for group in one for parameter in group["params"]]
    second = [(group, parameter.detach()) for group in other for parameter in group["params"]]
    return [(name, before, *pair) for name, before, pair in zip(names, first, second, strict=True)]


def _move_state(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer, *, is_main: bool) -> None:
    """Give `other` the state of `optimizer`, as a checkpoint does. Collective."""
    state = gather_to_main(optimizer_state(_as_model(optimizer), optimizer), here=True)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = matching_state(_as_model(other), other, torch.load(file, weights_only=True))
    broadcast_optimizer_state(_as_model(other), other, outline(loaded), loaded if is_main else None)


def _as_model(optimizer: torch.optim.Optimizer) -> nn.Module:
    """A module whose parameters are those of `optimizer`, named by their numbers."""
    return nn.ParameterList(parameter for group in optimizer.param_groups for parameter in group["params"])
