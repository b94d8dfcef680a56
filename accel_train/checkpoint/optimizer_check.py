"""Whether a saved optimizer state is one that an optimizer can go on with.

Torch takes whatever it is given, and a fused kernel that meets a tensor of another shape ends the process. What a state
has to look like is not written down anywhere, but an optimizer of the same kind shows it: one step of a copy that
has a parameter of the same shape.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.checkpoint.state_dict import HOW_TO_COMPUTE, parameter_names
from accel_train.untrusted import is_number

LARGEST_FLOAT = torch.finfo(torch.float32).max


class MisfitError(ValueError):
    """Why a state does not fit."""


def fitting(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, keep: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The part of `saved` (as `full_state.optimizer_state` gives it) that `optimizer` takes, and the names of those
    parameters whose state is not there.

    `keep`: settings of the parameter groups that are not taken, for they were changed; the state is still that of the
    old ones. Raises MisfitError.
    """
    if not (isinstance(saved, dict) and isinstance(saved.get("state"), dict)):
        raise MisfitError("it has no state")
    if not isinstance(saved.get("param_groups"), list):
        raise MisfitError("it has no parameter groups")
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
            then, _ = example(number, tuple(keep), *like)
            found = _like(then, saved["state"][name], f"the state of {name}")
            if expected.keys() <= found.keys():
                state[name] = found
            else:  # what the new settings need was never kept
                missing.append(name)
        groups.append((list(named), settings))
    if missing and state and isinstance(optimizer, torch.optim.SGD):
        # Its fused kernel takes all momentums or none. Without dampening zero is what it would start with.
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for name, parameter in zip(parameter_names(model, optimizer), parameters, strict=True):
            state.setdefault(name, {"momentum_buffer": torch.zeros(parameter.shape, dtype=parameter.dtype)})
    others = {  # Kron's random state
        key: _like(value, saved[key], f"its {key}")
        for key, value in optimizer.state_dict().items()
        if key in saved and key not in ("state", "param_groups")
    }
    if [params for params, _ in groups] != [_value(group, "params") for group in saved["param_groups"]]:
        # Grouped in another way: this run's settings count.
        return {**others, "state": state, "param_groups": []}, missing
    fixed, taken = {*HOW_TO_COMPUTE, *keep}, []
    for (params, settings), now, old in zip(groups, optimizer.param_groups, saved["param_groups"], strict=True):
        numbers = {
            key: _like(value, old[key], f"its {key}")
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
    """The state of a parameter, and the settings of its group `number`, after a first step of a copy of `optimizer`,
    with those settings of the group that the checkpoint had and this run has changed (`keep`)."""
    group, old = optimizer.param_groups[number], saved[number] if number < len(saved) else None
    changed = {key: old[key] for key in keep if key in old and key in group} if isinstance(old, dict) else {}
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    kind: Any = type(optimizer)  # all else that it was made with is in its groups, too
    try:
        copy = kind([{**group, **changed, "params": [parameter]}])
        copy.step()
    except Exception as error:
        if not changed:
            raise
        raise MisfitError(f"its settings do not work: {error}") from None
    settings = {key: value for key, value in copy.param_groups[0].items() if key != "params"}
    return dict(copy.state[parameter]), settings


def _like(expected: Any, found: Any, where: str) -> Any:
    """`found`, if it is built as `expected` is: the same shapes, kinds of numbers, and keys. Raises MisfitError."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            raise MisfitError(f"{where} should have {', '.join(map(str, expected))}")
        return {key: _like(value, found[key], f"{key} in {where}") for key, value in expected.items()}
    if isinstance(expected, (list, tuple)):
        if type(found) is not type(expected) or len(found) != len(expected):
            raise MisfitError(f"{where} should be {len(expected)} values")
        return type(expected)([_like(value, part, where) for value, part in zip(expected, found, strict=True)])
    if isinstance(expected, Tensor) and expected.dim():
        if isinstance(found, Tensor) and _is_plain(found) and _sort(found) == _sort(expected):
            return found.detach()
    elif _is_numeric(expected):
        value = found.item() if isinstance(found, Tensor) and found.dim() == 0 and _is_plain(found) else found
        if isinstance(expected, bool) or isinstance(value, bool):
            fits = type(value) is type(expected)
        else:
            fits = is_number(value, -LARGEST_FLOAT, LARGEST_FLOAT) or value == expected  # some are infinite on purpose
        if fits:
            return torch.tensor(value, dtype=expected.dtype) if isinstance(expected, Tensor) else value
    elif type(found) is type(expected) and found == expected:
        return found
    raise MisfitError(f"{where} is {_shown(found)} instead of {_shown(expected)}")


def _is_numeric(value: Any) -> bool:
    """A number, true or false, a tensor of a single number, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_numeric, value))
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _is_plain(tensor: Tensor) -> bool:
    """A tensor whose numbers lie in the host's memory, one by one."""
    kind = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return kind and tensor.device.type == "cpu" and not tensor.is_quantized


def _sort(tensor: Tensor) -> tuple[torch.Size, bool, bool]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _value(group: Any, key: str) -> Any:
    return group.get(key) if isinstance(group, dict) else None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim():
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    return str(value.item()) if isinstance(value, Tensor) and _is_plain(value) else repr(value)[:40]
