"""What a checkpoint saves: the position of a run with its counts, and the whole state of the model and its optimizer.

The state is the same on any number of processes, under DDP and FSDP2. Names are those of the unwrapped model.
`gather_to_main` copies complete tensors into the main process's memory; `broadcast_weights` and
`broadcast_optimizer_state` copy them back into the live tensors of all processes, whose number may have changed. All
three are collective.

`torch.distributed.checkpoint.state_dict` serves the same purpose, but is not exact for optimizers: to get or to set a
state it takes a step with zero gradients if there is none yet, which fills SGD's momentum with the weight decay; and it
cannot set the state of an optimizer that has none (plain SGD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from accel_train.config.schema import Config
from accel_train.data.order import Plan
from accel_train.errors import UserError, reason_of
from accel_train.files import LARGEST, is_count, is_number
from accel_train.models.wrapping import plain_name, unwrap_model
from accel_train.optim.optimizer import FUSED

FITS: dict[str, Callable[[Any], bool]] = {
    "int": is_count,
    "int | None": lambda value: value is None or is_count(value),
    "float": lambda value: is_number(value, -LARGEST),
    "float | None": lambda value: value is None or is_number(value, -LARGEST),
    "dict[str, float]": lambda values: (
        isinstance(values, dict) and all(is_number(v, -LARGEST) for v in values.values())
    ),
}
"""Type of an entry of a position -> whether a value of a checkpoint can be one."""


@dataclass
class TrainState:
    """The position of a run and its counts. All numbers are totals over all processes."""

    epoch: int = 0
    """The epoch that the next update belongs to."""
    update: int = 0
    """Updates done since the start of the run."""
    epoch_samples: int = 0
    """Samples of the epoch whose updates are done or skipped: where the next update begins in the epoch's order.
    Unlike a number of updates, it means the same with any batch size."""
    epoch_left_out: int = 0
    """Those of them that cannot be read, or whose updates were skipped; all others are in epoch_count."""
    samples_seen: int = 0
    best_value: float | None = None
    """The best value so far of --best-metric."""
    best_update: int | None = None
    """The update after which it was measured."""
    best_epoch: int | None = None
    """The epochs that were done then."""
    wall_seconds: float = 0.0
    """How long the run has lasted, all starts together, from each one's beginning to its last save or end of an epoch.
    What was done after the last save before a kill, and has to be done again, is counted once."""
    epoch_loss_sum: float = 0.0
    """This and the next two are sums over the samples of the current epoch, so that its training metrics are exact
    after a resume."""
    epoch_correct: int = 0
    epoch_count: int = 0
    epoch_sums: dict[str, float] = field(default_factory=dict)
    """The same of metrics other than loss and accuracy that are counted in training, by name."""
    train_seconds: float = 0.0
    """Training time in seconds, without the first update of each start (see `meter.Stopwatch`)."""
    timed_samples: int = 0
    """The samples trained in that time."""
    evaluated: int | None = None
    """The newest update within an epoch after which the run has evaluated, as --eval-every-updates or its end asks."""
    skipped_updates: int = 0
    """Updates that were skipped because their loss or gradient was not finite; see step.py."""
    skipped_in_a_row: int = 0
    """How many of them are the newest updates."""

    def check_position(self, samples: int, path: Path) -> None:
        """Raise UserError if a run with so many training samples cannot be at this position. `path`: the folder of the
        checkpoints, for the message."""
        counted = self.epoch_count + self.epoch_left_out
        most = self.epoch_samples if self.epoch == 0 else self.update  # every update has at least one sample
        if not counted == self.epoch_samples <= samples or self.update > most:
            raise UserError(
                f"The checkpoint of update {self.update} in {path} does not fit the training data, which has {samples} "
                f"samples: update {self.update} is not in epoch {self.epoch + 1} of it. Has the data changed?"
            )

    def check_epoch(self, plan: Plan) -> None:
        """At the end of an epoch, or of the run within it: raise RuntimeError unless every sample until there was
        counted once or is in a skipped update."""
        done = self.epoch_samples
        counted = self.epoch_count + self.epoch_left_out
        if counted != done or done > plan.samples or plan.updates_left(self.epoch, done):
            raise RuntimeError(
                f"epoch {self.epoch + 1} counted {self.epoch_count} samples and skipped {self.epoch_left_out}, in "
                f"updates of {done}, but the training data has {plan.samples}"
            )

    def stopped_by(self, config: Config, plan: Plan) -> str | None:
        """What has ended the run: "epochs", "updates", "patience" or "hours"; None if it goes on. The last two end it
        at epochs' ends only."""
        if plan.is_end(self.epoch, self.epoch_samples) and self.is_evaluated:
            return "updates" if plan.updates == config.stop.updates else "epochs"
        if self.epoch_samples or self.epoch == 0:
            return None
        patience = config.stop.patience_epochs
        evaluated = self.epoch % config.eval_every_epochs == 0
        if (
            patience is not None
            and evaluated
            and self.best_epoch is not None
            and self.epoch - self.best_epoch >= patience
        ):
            return "patience"
        return "hours" if self.out_of_time(config) else None

    @property
    def is_evaluated(self) -> bool:
        """Whether what follows update `update` is done: an evaluation, if one was due, and the end of an epoch."""
        return self.epoch_samples == 0 or self.evaluated == self.update

    def evaluation_is_pending(self, config: Config) -> bool:
        """Whether --eval-every-updates asks for an evaluation now, within an epoch, which is not done yet."""
        every = config.eval_every_updates
        return every is not None and self.update % every == 0 and not self.is_evaluated

    def current_epoch(self, config: Config, plan: Plan) -> int:
        """The current epoch, counted from 1; after the end of the last epoch still that one."""
        return self.epoch + (self.epoch_samples > 0 or self.stopped_by(config, plan) is None)

    def out_of_time(self, config: Config) -> bool:
        """Whether the hours of --stop.hours are over."""
        return config.stop.hours is not None and self.wall_seconds >= config.stop.hours * 3600

    def record_best(self, value: float, epoch: int, *, lower: bool) -> bool:
        """Take the value of the best metric after `epoch` epochs; return whether it is the best one so far.

        `lower`: whether lower values are better. One that is not finite is never the best.
        """
        best = self.best_value
        is_best = math.isfinite(value) and (best is None or (value < best if lower else value > best))
        if is_best:
            self.best_value, self.best_update, self.best_epoch = value, self.update, epoch
        elif self.best_epoch is None:
            self.best_epoch = epoch  # nothing is finite yet: the patience begins here
        return is_best

    def forget_best(self) -> None:
        """Begin anew, by another metric."""
        self.best_value = self.best_update = self.best_epoch = None

    def begin_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch and reset the counts of an epoch."""
        self.epoch, self.epoch_samples, self.epoch_left_out, self.evaluated = epoch, 0, 0, None
        self.epoch_loss_sum, self.epoch_correct, self.epoch_count, self.epoch_sums = 0.0, 0, 0, {}

    def add_metrics(self, totals: Mapping[str, float], samples: int) -> None:
        """Count the sums of the training's metrics over `samples` more samples of the epoch."""
        others = dict(totals)
        self.epoch_loss_sum += others.pop("loss")
        self.epoch_correct += int(others.pop("accuracy", 0))  # data with several labels an image has none
        # A metric that was not counted from the epoch's first sample on (the run began without it) waits for the next.
        counted = [name for name in others if name in self.epoch_sums or self.epoch_count == 0]
        self.epoch_sums = {name: self.epoch_sums.get(name, 0) + others[name] for name in counted}
        self.epoch_count += samples

    @property
    def epoch_metrics(self) -> dict[str, float]:
        """The mean of each metric over the epoch's samples so far."""
        totals = {"loss": self.epoch_loss_sum, "accuracy": self.epoch_correct, **self.epoch_sums}
        return {name: total / self.epoch_count if self.epoch_count else math.nan for name, total in totals.items()}

    def to_saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return asdict(self)

    @classmethod
    def from_saved(cls, saved: dict[str, Any], path: Path) -> TrainState:
        """Read what `to_saved` wrote into the checkpoint `path`. Raises UserError for entries that are unknown or
        missing, and for values that are impossible."""
        others = sorted(saved.keys() ^ {entry.name for entry in fields(cls)})
        state = cls() if others else cls(**saved)
        if name := others[0] if others else state._impossible():
            raise UserError(
                f"{path / 'state.json'}: {name} is {str(saved.get(name, 'missing'))[:40]!r}, which no run can have "
                f"counted. If you do not trust it, delete {path}; the previous checkpoint is used then."
            )
        if path.name.startswith("update-") and path.name != f"update-{state.update:08d}":
            raise UserError(
                f"{path} holds the checkpoint of update {state.update}: rename it to update-{state.update:08d}."
            )
        return state

    def _impossible(self) -> str:
        """The name of an entry that has a wrong type or is out of range; "" if there is none."""
        for entry in fields(self):
            if not FITS[str(entry.type)](getattr(self, entry.name)):
                return entry.name
        return "" if self.epoch <= self.update else "epoch"


# The whole state of a model and its optimizer.


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


def check_same_model(targets: dict[str, Tensor], values: dict[str, Tensor], path: Path) -> None:
    """Raise UserError unless `values`, read from `path`, have the names, shapes and kinds of numbers of `targets`."""
    for name in sorted(targets.keys() | values.keys()):
        expected, actual = (str(tuple(t[name].shape)) if name in t else "missing" for t in (targets, values))
        if expected == actual and targets[name].dtype.is_floating_point != values[name].dtype.is_floating_point:
            expected, actual = (str(t[name].dtype).removeprefix("torch.") for t in (targets, values))
        if expected != actual:
            raise UserError(f"{path} is of another model: {name} is {actual} there and {expected} in this model.")


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

    Tensors are copied even on the CPU, so that training can go on while the copy is written.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().to("cpu", copy=True) if here else None

    return _with_tensors(tree, gather)


def _with_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of nested dicts, lists and tuples that has what `change` makes of each tensor, in their order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _with_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_with_tensors(value, change) for value in tree])
    return tree


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
) -> None:
    """Load the main process's state into the optimizers of all processes. Collective.

    `values`: what `matching_state` made of the saved state; None on the other processes. `shape`: its `outline`, on
    all processes. Raises MismatchError if the optimizer does not take the state.
    """
    names = parameter_names(model, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: _fill(shape["state"][names[number]], values and values["state"][names[number]], parameter)
        for number, parameter in enumerate(parameters)
        if names[number] in shape["state"]
    }
    groups = [
        {**saved, **{key: value for key, value in group.items() if key in ("params", *HOW_TO_COMPUTE)}}
        for group, saved in zip(optimizer.state_dict()["param_groups"], shape["param_groups"], strict=True)
    ]
    try:
        optimizer.load_state_dict({**shape, "state": state, "param_groups": groups})
    except Exception as error:  # whatever an optimizer raises for a state of another one
        raise MismatchError(reason_of(error, 200)) from error


class MismatchError(ValueError):
    """A saved state does not match the optimizer; the message says why."""


def state_mismatch(update: int, reason: str) -> UserError:
    """Return the error for an optimizer that a checkpoint's state cannot be loaded into, or whose first step fails."""
    return UserError(
        f"The optimizer's state in the checkpoint of update {update} does not fit this run's optimizer: {reason}. If "
        "its settings have changed, give the old ones. If you do not trust the checkpoint, delete it; the previous one "
        "is used then."
    )


def matching_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Any, keep: Collection[str] = ()
) -> dict[str, Any]:
    """The part of `saved` (made by `optimizer_state`) that is for the parameters of `optimizer`.

    The settings of its parameter groups are the saved ones, but for those in `keep`, because the user changed them, and
    for all of them if the parameters are grouped in a different way. Raises MismatchError for what would crash the
    process: torch loads any state, and fused kernels do not look at its shapes. What else may be wrong with it raises
    an error here, where it is loaded, or in the first step.
    """
    names = parameter_names(model, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[str, Any] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if values := saved["state"].get(name):
            state[name] = _checked_state(name, values, parameter, fused=isinstance(optimizer, FUSED))
    groups = optimizer.state_dict()["param_groups"]
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in groups]
    if [group["params"] for group in groups] == [group["params"] for group in saved["param_groups"]]:
        groups = [
            {key: value for key, value in old.items() if key not in keep}
            | {key: value for key, value in group.items() if key in keep}
            for group, old in zip(groups, saved["param_groups"], strict=True)
        ]
    return {**saved, "state": state, "param_groups": groups}


def _checked_state(name: str, values: Any, parameter: Tensor, *, fused: bool) -> dict[str, Any]:
    """The saved `values` of a parameter. Raises MismatchError, for a `fused` kernel also for other shapes."""

    def plain(tensor: Tensor) -> Tensor:
        ordinary = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not (ordinary and tensor.device.type == "cpu" and not tensor.is_quantized):
            raise MismatchError(f"the state of {name} has a tensor that is not an ordinary one")
        return tensor.detach()

    checked: dict[str, Any] = _with_tensors(values, plain)
    for key, value in checked.items() if fused else ():
        shape = torch.Size() if key == "step" else parameter.shape
        fits = isinstance(value, Tensor) and value.shape == shape and value.is_floating_point()
        if not (fits or value is None):
            found = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
            raise MismatchError(f"{key} of {name} is {found} instead of a tensor {tuple(shape)}")
    return checked


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
