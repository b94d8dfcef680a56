"""Checks that an optimizer can go on with a saved state.

Torch loads any state without checking it, and a fused kernel crashes the process if a tensor has the wrong shape. No
interface describes what the state has to look like, so it is found by experiment: a copy of the optimizer takes one
step with a parameter of the same shape.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.checkpoint.format import Snapshot
from accel_train.checkpoint.state_dict import HOW_TO_COMPUTE, parameter_names
from accel_train.checkpoint.train_state import TrainState
from accel_train.errors import UserError
from accel_train.untrusted import is_number

LARGEST_FLOAT = torch.finfo(torch.float32).max


class MismatchError(ValueError):
    """A saved state does not match the optimizer; the message says why."""


def matching_optimizer(
    path: Path,
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: TrainState,
    keep: Sequence[str],
    notes: list[str],
    stepless: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The part of the saved optimizer state that this run's optimizer takes. Raises UserError if they do not match.

    `stepless`: the names of parameters that have had no step and no state yet.
    """
    trained = position.update > len(position.left_out)
    try:
        matching, missing = matching_state(model, optimizer, snapshot.optimizer, keep)
        # With a loss scaler the first updates often overflow, and leave no state.
        if missing and not matching["state"] and not keep and trained and not snapshot.state["scaler"]:
            raise MismatchError(f"it has no state of any parameter after {position.update} updates")
    except MismatchError as error:
        raise UserError(
            f"{path / 'optimizer.pt'} does not fit this run's optimizer: {error}. If you do not trust it, delete "
            f"{path}; the previous checkpoint is used then."
        ) from None
    missing = [name for name in missing if name not in stepless]
    if missing and trained:
        notes.append(
            f"{path / 'optimizer.pt'} has no state of {len(missing)} parameters, such as {missing[0]}: the "
            "optimizer starts with a new state for them"
        )
    return matching


def matching_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, keep: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The part of `saved` (made by `state_dict.optimizer_state`) that matches `optimizer`, and the names of the
    parameters that have no saved state.

    `keep`: settings of the parameter groups that are not taken from `saved`, because the user changed them; the saved
    state still belongs to the old ones. Raises MismatchError.
    """
    if not (isinstance(saved, dict) and isinstance(saved.get("state"), dict)):
        raise MismatchError("it has no state")
    if not isinstance(saved.get("param_groups"), list):
        raise MismatchError("it has no parameter groups")
    names = iter(parameter_names(model, optimizer))
    example = functools.cache(functools.partial(_after_a_step, optimizer, saved["param_groups"]))
    state, groups, missing = {}, [], []
    for number, group in enumerate(optimizer.param_groups):
        named = {next(names): parameter for parameter in group["params"]}
        settings: dict[str, Any] = {}
        for name, parameter in named.items():
            like = parameter.shape, parameter.dtype, parameter.device
            expected, settings = example(number, (), *like)
            if name not in saved["state"]:
                missing += [name] if expected else []
                continue
            saved_like, _ = example(number, tuple(keep), *like)
            matching = _match(saved_like, saved["state"][name], f"the state of {name}")
            if expected.keys() <= matching.keys():
                state[name] = matching
            else:  # the new settings need a state that was never kept
                missing.append(name)
        groups.append((list(named), settings))
    if missing and state and isinstance(optimizer, torch.optim.SGD):
        # Its fused kernel requires a momentum for all parameters or none. Without dampening, it starts at zero.
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for name, parameter in zip(parameter_names(model, optimizer), parameters, strict=True):
            state.setdefault(name, {"momentum_buffer": torch.zeros(parameter.shape, dtype=parameter.dtype)})
    others = {  # Kron's random state
        key: _match(value, saved[key], f"its {key}")
        for key, value in optimizer.state_dict().items()
        if key in saved and key not in ("state", "param_groups")
    }
    of_saved = [group.get("params") if isinstance(group, dict) else None for group in saved["param_groups"]]
    if [params for params, _ in groups] != of_saved:
        # The parameters are grouped in a different way: this run's settings are used.
        return {**others, "state": state, "param_groups": []}, missing
    fixed, taken = {*HOW_TO_COMPUTE, *keep}, []
    for (params, settings), now, old in zip(groups, optimizer.param_groups, saved["param_groups"], strict=True):
        numbers = {
            key: _match(value, old[key], f"its {key}")
            for key, value in settings.items()
            if key in old and key not in fixed and _is_numeric(value)
        }
        taken.append({**now, **numbers, "params": params})
    return {**others, "state": state, "param_groups": taken}, missing


def _after_a_step(
    optimizer: torch.optim.Optimizer,
    saved: list[Any],
    number: int,
    keep: tuple[str, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a parameter and the settings of its group `number` after a first step of a copy of `optimizer`.

    `keep`: settings of the group that this run has changed; the copy uses the checkpoint's. Raises MismatchError if the
    optimizer does not work with them.
    """
    group, old = optimizer.param_groups[number], saved[number] if number < len(saved) else None
    changed = {key: old[key] for key in keep if key in old and key in group} if isinstance(old, dict) else {}
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer_class: Any = type(optimizer)  # its other arguments are in its groups
    try:
        copy = optimizer_class([{**group, **changed, "params": [parameter]}])
        copy.step()
    except Exception as error:
        if not changed:
            raise
        raise MismatchError(f"its settings do not work: {error}") from None
    settings = {key: value for key, value in copy.param_groups[0].items() if key != "params"}
    return dict(copy.state[parameter]), settings


def _match(expected: Any, value: Any, where: str) -> Any:
    """`value`, if it has the same shapes, kinds of numbers and keys as `expected`; else raises MismatchError.

    `where`: the name of `value` in the message.
    """
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != expected.keys():
            raise MismatchError(f"{where} should have {', '.join(map(str, expected))}")
        return {key: _match(item, value[key], f"{key} in {where}") for key, item in expected.items()}
    if isinstance(expected, (list, tuple)):
        if type(value) is not type(expected) or len(value) != len(expected):
            raise MismatchError(f"{where} should be {len(expected)} values")
        return type(expected)([_match(item, part, where) for item, part in zip(expected, value, strict=True)])
    if isinstance(expected, Tensor) and expected.dim():
        if isinstance(value, Tensor) and _is_plain(value) and _kind(value) == _kind(expected):
            return value.detach()
    elif _is_numeric(expected):
        number = value.item() if isinstance(value, Tensor) and value.dim() == 0 and _is_plain(value) else value
        if isinstance(expected, bool) or isinstance(number, bool):
            matches = type(number) is type(expected)
        else:  # some settings are infinite on purpose
            matches = is_number(number, -LARGEST_FLOAT, LARGEST_FLOAT) or number == expected
        if matches:
            return torch.tensor(number, dtype=expected.dtype) if isinstance(expected, Tensor) else number
    elif type(value) is type(expected) and value == expected:
        return value
    raise MismatchError(f"{where} is {_shown(value)} instead of {_shown(expected)}")


def _is_numeric(value: Any) -> bool:
    """Whether it is a number, true or false, a tensor of a single number, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_numeric, value))
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary dense tensor in host memory: not sparse, not quantized, no subclass."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return ordinary and tensor.device.type == "cpu" and not tensor.is_quantized


def _kind(tensor: Tensor) -> tuple[torch.Size, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return str(value.item()) if isinstance(value, Tensor) and _is_plain(value) else repr(value)[:40]
