"""The whole state of a model and its optimizer, the same on any number of processes, under DDP and FSDP2.

Names are those of the unwrapped model. `gather_to_main` copies complete tensors into the main process's memory;
`broadcast_weights` and `broadcast_optimizer_state` copy them back into the live tensors of all processes, whose number
may have changed. All three are collective.

`torch.distributed.checkpoint.state_dict` serves the same purpose, but is not exact for optimizers: to get or to set a
state it takes a step with zero gradients if there is none yet, which fills SGD's momentum with the weight decay; and it
cannot set the state of an optimizer that has none (plain SGD).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from accel_train.models.wrapping import plain_name, unwrap_model

HOW_TO_COMPUTE = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)  # depend on this machine and are never taken from a checkpoint


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and persistent buffers of a wrapped model by their plain names (DTensors under FSDP2).

    Tied weights appear under each of their names.
    """
    state = unwrap_model(model).state_dict()
    assert all(isinstance(value, Tensor) for value in state.values()), "modules with extra state are not supported"
    return {plain_name(name): value.detach() for name, value in state.items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's live `state_dict()`, with parameters identified by name instead of by number."""
    names = parameter_names(model, optimizer)
    state = optimizer.state_dict()
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in state["param_groups"]]
    by_name = {names[i]: values for i, values in state["state"].items()}
    return {**state, "state": by_name, "param_groups": groups}


def gather_to_main(tree: Any, *, here: bool) -> Any:
    """A copy of nested dicts, lists and tuples in which tensors are complete and in host memory; None instead of
    tensors where `here` is false.

    Tensors are copied even on the CPU, so that training can go on while the copy is written. On CUDA the host waits for
    the device once, not for each tensor: all copies go to pinned memory, which torch keeps for the next time.
    """
    devices: set[torch.device] = set()

    def gather(tensor: Tensor) -> Tensor | None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return _to_host(whole.detach(), devices) if here else None

    copy = _with_tensors(tree, gather)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copy


def _with_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of nested dicts, lists and tuples that has what `change` makes of each tensor, in their order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _with_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_tensors(value, change) for value in tree])
    return tree


def _to_host(tensor: Tensor, devices: set[torch.device]) -> Tensor:
    """A copy in host memory; from CUDA it is asynchronous, and the device is added to `devices`."""
    if tensor.device.type == "cuda":
        try:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:  # the host has no memory left to pin, but may have ordinary memory
            return tensor.to("cpu", copy=True)
        devices.add(tensor.device)
        return copy.copy_(tensor, non_blocking=True)
    return tensor.to("cpu", copy=True)


@torch.no_grad()
def broadcast_weights(targets: dict[str, Tensor], values: dict[str, Tensor] | None) -> None:
    """Copy the main process's complete `values` into the live `targets` of all processes. Collective."""
    for name, target in targets.items():
        _receive(target, values[name] if values is not None else None)


def outline(tree: Any) -> Any:
    """`tree` with its tensors replaced by meta tensors (shape and dtype only); tensors of a single number are kept."""
    return _with_tensors(tree, lambda tensor: torch.empty_like(tensor, device="meta") if tensor.dim() else tensor)


@torch.no_grad()
def broadcast_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shape: dict[str, Any],
    values: dict[str, Any] | None,
    keep: Collection[str] = (),
) -> None:
    """Load the main process's state into the optimizers of all processes. Collective.

    `values`: what `gather_to_main` made of `optimizer_state`; None on the other processes. `shape`: its `outline`, on
    all processes. `keep`: settings of the parameter groups ("weight_decay") that stay as they are now; all stay if the
    parameters are grouped in a different way.
    """
    names = parameter_names(model, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: _fill(shape["state"][names[number]], values and values["state"][names[number]], parameter)
        for number, parameter in enumerate(parameters)
        if names[number] in shape["state"]
    }
    groups = optimizer.state_dict()["param_groups"]
    saved, fixed = shape["param_groups"], {"params", *HOW_TO_COMPUTE, *keep}
    if [[names[i] for i in group["params"]] for group in groups] == [group["params"] for group in saved]:
        groups = [
            {**old, **{key: value for key, value in group.items() if key in fixed}}
            for group, old in zip(groups, saved, strict=True)
        ]
    optimizer.load_state_dict({**shape, "state": state, "param_groups": groups})


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The plain names of the optimizer's parameters, in the order in which its `state_dict()` numbers them."""
    names = {id(parameter): plain_name(name) for name, parameter in unwrap_model(model).named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _fill(shape: Any, value: Any, parameter: Tensor) -> Any:
    """The optimizer's state of one parameter on this process: shaped like `shape`, with the main process's values."""
    if isinstance(shape, dict):
        return {key: _fill(item, value and value[key], parameter) for key, item in shape.items()}
    if isinstance(shape, (list, tuple)):
        parts = [_fill(item, value and value[i], parameter) for i, item in enumerate(shape)]
        return type(shape)(parts)
    if not isinstance(shape, Tensor) or shape.dim() == 0:
        return shape
    if (
        shape.shape == parameter.shape
    ):  # sharded like the parameter, and in its memory format, which fused kernels require
        target = torch.empty_like(parameter, dtype=shape.dtype)
    else:
        target = torch.empty(shape.shape, dtype=shape.dtype, device=parameter.device)
        if isinstance(parameter, DTensor):  # Adafactor keeps sums over rows or columns
            mesh = parameter.device_mesh
            target = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    _receive(target, value)
    return target


def _receive(target: Tensor, value: Tensor | None) -> None:
    """Copy the main process's complete `value` into `target`, or, if `target` is a shard, that part of it."""
    local = target.to_local() if isinstance(target, DTensor) else target
    if value is None:
        whole = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    else:
        whole = value.to(local.device, target.dtype).contiguous()
    if dist.is_initialized():
        dist.broadcast(whole, src=0)
    if isinstance(target, DTensor):
        # Each process has the whole tensor now, so nobody needs to send shards.
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(whole)
