"""Detects NaN and infinite losses and gradients, on all processes, before an update changes the weights.

After the backward pass of an update each process checks on its device whether its losses and gradients are finite. One
all-reduce (MAX of a single number, on the device) gives all processes the same answer. This works with DDP, with FSDP2,
and if only one process has a bad loss. The host reads the answer at one of two times:

* With `skip`, before the optimizer's step, which must not happen. On a GPU this waits for the device once per update.
* With `stop`, one update later, when a GPU has long computed it. Nothing that a bad update did to weights, optimizer,
  EMA and statistics is ever used: the host always reads the answer before anything is logged, saved or evaluated.

With fp16, an overflow of the scaled gradients is normal: the scaler skips such updates and lowers its scale. It counts
as an error if the scale has fallen below 1 or if the loss itself is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train.checkpoint.state import TrainState
from accel_train.compat import flag_nonfinite, scale_without_waiting
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.records.events import Event, Noted, Skipped

MOST_IN_A_ROW = 10  # skipped updates in a row: then the model is broken, not a sample


@dataclass
class CheckedUpdate:
    """The samples and losses of one update, on this process."""

    number: int  # of the update, counted from 1
    computed: list[tuple[Tensor, Tensor]]  # see Step.computed
    bad: Tensor  # 1 or 0; from CUDA a copy on the host, valid after the event `copied`
    copied: Any = None


class Guard:
    """Checks each update and reacts as --on-nonfinite says. All processes must make the same calls."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        emit: Callable[[Event], None],
        has_no_checkpoint: Callable[[], bool] = lambda: True,
    ) -> None:
        """`model`: as Accelerate prepared it; `emit`: says what happens; `has_no_checkpoint`: whether the run could not
        go on from one. Collective."""
        self.config, self.accelerator = config, accelerator
        self.emit, self.has_no_checkpoint = emit, has_no_checkpoint
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._one = torch.ones((), device=accelerator.device)
        self._unread: CheckedUpdate | None = None  # the previous update, if the host has not yet read its answer

    @torch.no_grad()
    def check_step(self, state: TrainState, computed: list[tuple[Tensor, Tensor]]) -> bool:
        """Whether the optimizer may take its step. Call it after the last backward pass, with `Step.computed`.

        If not, the update is skipped: discard it. Raises UserError with --on-nonfinite stop.
        """
        checked = CheckedUpdate(state.update + 1, computed, self._find_bad(computed))
        if self.config.on_nonfinite == "skip":
            if checked.bad.item():
                self._skip(checked, state)
                return False
        else:
            self.check_previous()
            if checked.bad.device.type == "cuda":
                checked.bad = torch.empty((), pin_memory=True).copy_(checked.bad, non_blocking=True)
                checked.copied = torch.cuda.current_stream().record_event()
            self._unread = checked
        state.skipped_in_a_row = 0
        return True

    def check_previous(self) -> None:
        """Read the answer for the newest update that `check_step` has let through, if the host has not read it yet.

        Call it before something is logged or saved. Raises UserError if that update was not finite.
        """
        checked, self._unread = self._unread, None
        if checked is not None:
            if checked.copied is not None:
                checked.copied.synchronize()
            if checked.bad.item():
                self._stop(checked)

    def _find_bad(self, computed: list[tuple[Tensor, Tensor]]) -> Tensor:
        """1 if this update must not count, else 0: float32 [] on the device, the same on all processes."""
        present = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in present]
        losses, scaler = [losses for _, losses in computed], self.accelerator.scaler
        if scaler is None:
            return self._any_process(self._is_not_finite([*losses, *gradients]))
        scale = scale_without_waiting(scaler)
        assert scale is not None  # since the first backward pass
        flags = self._is_not_finite(losses), self._is_not_finite(gradients), (scale < 1).float()
        bad_loss, bad_gradient, low_scale = self._any_process(torch.stack(flags))
        return torch.maximum(bad_loss, bad_gradient * low_scale)

    def _any_process(self, values: Tensor) -> Tensor:
        """The largest of all processes' `values`, in place."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def _is_not_finite(self, tensors: list[Tensor]) -> Tensor:
        """1 if a value of this process's `tensors` is not finite, else 0: float32 [] on the device."""
        device, tensors = self.accelerator.device, [tensor for tensor in tensors if tensor.numel()]
        if device.type == "cpu":
            return torch.tensor(0.0 if _all_finite(tensors) else 1.0)
        if device.type == "cuda":
            # Only on CUDA: on MPS the kernel has given wrong answers for bf16.
            bad = torch.zeros((), device=device)
            flag_nonfinite(tensors, bad, self._one)
            return bad
        return 1 - nn.utils.get_total_norm(tensors, norm_type=math.inf).to(device).isfinite().float()

    def _skip(self, checked: CheckedUpdate, state: TrainState) -> None:
        """Count a bad update as skipped. Raises UserError if there were too many in a row."""
        if state.skipped_in_a_row >= MOST_IN_A_ROW:
            self._stop(checked)
        state.skipped_updates += 1
        state.skipped_in_a_row += 1
        self.emit(Skipped(checked.number, self._describe(checked), state.skipped_updates))

    def _stop(self, checked: CheckedUpdate) -> NoReturn:
        """Report a bad update and raise UserError."""
        problem = self._describe(checked)
        self.emit(Noted(f"not finite: {problem}", {"update": checked.number, "action": "stop"}))
        if self.has_no_checkpoint():
            kept, go_on = "There is no checkpoint yet", "start again with another optim.lr"
        else:
            kept, go_on = "The last checkpoint is intact", "continue from it with another optim.lr (--allow-change)"
        advice = f"{go_on}, or with --on-nonfinite skip"
        if self.config.on_nonfinite == "skip":
            reason = f"the {MOST_IN_A_ROW} updates before it were skipped for the same reason"
            advice = f"{reason}: lower optim.lr in a new run"
        raise UserError(f"Update {checked.number} is not finite: {problem}. {kept}; {advice}.")

    def _describe(self, checked: CheckedUpdate) -> str:
        """What is not finite, the same on all processes."""
        # A process that had only padding has computed nothing.
        own = [pair for ids, losses in checked.computed for pair in zip(ids.tolist(), losses.tolist(), strict=True)]
        everyone: list[tuple[int, float]] = gather_object(own)
        bad = [id_ for id_, loss in everyone if not math.isfinite(loss)]
        if not bad:
            return "the gradient, though all losses are finite"
        shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        return f"the loss of {len(bad)} of {len(everyone)} samples (ids {shown})"


def _all_finite(tensors: list[Tensor]) -> bool:
    """Whether all values of tensors on the CPU are finite. Summing is the fastest way to read them."""
    # The sum of finite values may overflow, so a sum that is not finite needs the slow check.
    return all(math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all()) for tensor in tensors)
