"""`--cuda-graph true`: records the kernels of an update once, and then starts them all at once.

The update of a small network on a GPU takes as long as launching its kernels. A CUDA graph launches all that a function
has launched while it was recorded, on the same memory, and Python does not run again. So what changes from update to
update must be in tensors that stay in their place: the batch, the learning rates and the EMA's decay are copied into
such tensors before, and gradients are set to zero instead of None. The kernels are those of an update that is not
recorded, so the result has the same bits; only learning rates are rounded to float32, in all updates of the run.

The update consists of two functions (train.py): `compute_gradients` of a micro-batch, and `apply_gradients`. Their
first calls are not recorded, because they choose kernels and create what stays in its place; nor are updates with
padding. No process waits for another in them. Between them the gradients are summed, in the place of DDP: by one
all-reduce of one tensor, of which each parameter's gradient is a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.optim.ema import Ema
from accel_train.optim.micro_batch import is_out_of_memory

WARM_UP = 3  # calls that are not recorded
Batch = dict[str, Any]
Pass = Callable[[Batch], tuple[Tensor, ...]]


class UpdateGraphs:
    """The recorded parts of an update, of one process each, and the sum of the gradients of all."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
    ):
        """`model`: without DDP, and without gradients. `optimizer`: without Accelerate's wrapper, before its first
        step. Raises UserError if the update cannot be recorded."""
        _check(config, accelerator, optimizer)
        self._gradients = _set_gradients(model) if accelerator.num_processes > 1 else []
        self._optimizer, self._ema = optimizer, ema
        self._rates = [torch.zeros((), device=accelerator.device) for _ in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        optimizer._warned_capturable_if_run_uncaptured = True  # the first steps are run like that
        if ema is not None:
            ema.weight = torch.zeros((), device=accelerator.device)
        self.reset()

    def reset(self) -> None:
        """Record anew: to be called when the optimizer's state is replaced."""
        self._batch: Batch = {}
        self._compute, self._apply = _Recorded(), _Recorded()

    def compute(self, function: Pass, batch: Batch) -> tuple[Tensor, ...]:
        """What `function` returns for `batch`: new tensors. All micro-batches have the same shapes and no padding."""
        if not self._batch:
            tensors = {name: values for name, values in batch.items() if isinstance(values, Tensor)}
            self._batch = {name: torch.empty_like(values) for name, values in tensors.items()}
        for name, values in self._batch.items():
            values.copy_(batch[name])
        return tuple(result.clone() for result in self._compute(lambda: function(self._batch)))

    def sum_gradients(self) -> None:
        """Replace each process's gradients of an update by the sum over all processes. Collective."""
        for gradients in self._gradients:
            dist.all_reduce(gradients)

    def apply(self, function: Callable[[], Any], update: int, *, padded: bool) -> None:
        """Call `function`, which applies the gradients of update number `update`, counted from 1."""
        groups = self._optimizer.param_groups
        for rate, group in zip(self._rates, groups, strict=True):
            rate.fill_(group["lr"])
        if self._ema is not None and self._ema.weight is not None:
            self._ema.weight.fill_(1.0 - self._ema.get_decay(update))
        with _replaced(groups, self._rates):
            if padded:
                function()
            else:
                self._apply(function)


class _Recorded:
    """Calls a function; after the first calls it records the function's kernels, and from then on repeats them."""

    def __init__(self) -> None:
        self._calls = 0
        self._graph: Any = None
        self._results: Any = None

    def __call__(self, function: Callable[[], Any]) -> Any:
        if self._calls < WARM_UP:
            self._calls += 1
            return function()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            try:
                # Threads that load data use the device meanwhile.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self._results = function()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                reason = str(error).strip().partition("\n")[0]
                raise UserError(f"--cuda-graph: the update cannot be recorded ({reason}): leave it out.") from error
        self._graph.replay()
        return self._results


def _set_gradients(model: nn.Module) -> list[Tensor]:
    """Give each trained parameter a gradient of 0, in its layout, a part of one tensor [n] for each dtype."""
    parameters, together = [parameter for parameter in model.parameters() if parameter.requires_grad], []
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        same = [parameter for parameter in parameters if parameter.dtype == dtype]
        sizes = [parameter.numel() for parameter in same]
        together.append(torch.zeros(sum(sizes), dtype=dtype, device=same[0].device))
        for parameter, part in zip(same, torch.split(together[-1], sizes), strict=True):
            parameter.grad = part.as_strided(parameter.size(), torch.empty_like(parameter, device="meta").stride())
    return together


@contextmanager
def _replaced(groups: list[dict[str, Any]], rates: list[Tensor]) -> Iterator[None]:
    """Within it the learning rates of the optimizer's `groups` are the tensors `rates`."""
    numbers = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number


def _check(config: Config, accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    obstacle = None
    if accelerator.device.type != "cuda":
        obstacle = f"this run is on {accelerator.device.type}, and only CUDA devices have graphs"
    elif accelerator.distributed_type == DistributedType.FSDP:
        obstacle = "the sums of FSDP are not recorded: choose another configuration of accelerate"
    elif accelerator.num_processes > 1 and accelerator.ddp_handler.find_unused_parameters:
        obstacle = "this model may leave out parameters, and processes cannot agree on them: start one process"
    elif config.bitwise:
        obstacle = "the exact sums of --bitwise are not recorded"
    elif accelerator.scaler is not None:
        obstacle = "the loss scaler of fp16 decides on the host: use bf16 (--mixed_precision)"
    elif accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        obstacle = "torch.compile records its own graphs: start without --dynamo_backend"
    elif config.model.gradient_checkpointing:
        obstacle = "recomputation is not recorded: set model.gradient-checkpointing to false"
    elif config.micro_batch_size == "auto":
        obstacle = "graphs keep memory of their own, which --micro-batch-size auto does not try: give it a number"
    elif not all(is_torchs and (group.get("fused") or "capturable" in group) for group in optimizer.param_groups):
        obstacle = f"the optimizer {config.optim.name} reads its learning rate on the host: use momentum or adamw"
    if obstacle is not None:
        raise UserError(f"--cuda-graph: {obstacle}.")
