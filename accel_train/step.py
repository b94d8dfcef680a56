"""One update of the weights, the same on any number of processes:

    for batch in step.micro_batches(batches, update, samples):
        inputs, targets = …                                    # of the batch
        logits = step.forward(inputs)
        losses = criterion(logits, targets) * batch["weights"]
        step.backward(losses)
    if guard.check_step(state, step.computed):                 # looks for losses and gradients that are not finite
        step.apply(update + 1)
    else:
        step.discard()                                         # the update is skipped

That is the loop of a textbook. What the promises add to it is here: random numbers by update, sample and virtual batch,
BatchNorm over virtual batches, exact sums, padding that counts nothing, micro-batches that are empty on some processes,
when DDP sums, and the guard, which looks on all processes for NaN and infinite values before an update changes the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accel_train import models
from accel_train.checkpoint.state import TrainState
from accel_train.compat import flag_nonfinite, scale_without_waiting
from accel_train.config.schema import Config
from accel_train.data.order import Plan
from accel_train.errors import UserError
from accel_train.evaluate import Batch
from accel_train.exact_sum import ExactGradients
from accel_train.keyed import seed_pass
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import DropoutKeys, KeyedFunctions
from accel_train.models.verdict import Verdict
from accel_train.models.wrapping import BufferCopy, copy_buffers, kept_buffers, restore_buffers
from accel_train.records.events import Event, Noted, Skipped

if TYPE_CHECKING:
    from accel_train.optim.ema import Ema


@dataclass(frozen=True)
class Computed:
    """What a process has computed of a micro-batch."""

    ids: Tensor  # int64 [b], of the samples
    losses: Tensor  # float32 [b]
    weights: Tensor  # float32 [b], 0 for padding


class Step:
    """Takes the updates of a run: gradients from micro-batches, then the optimizer's step with all that follows it.

    All processes make the same calls.
    """

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        plan: Plan,
        model: nn.Module,
        bare_model: nn.Module,
        optimizer: Any,
        *,
        ema: Ema | None,
        verdict: Verdict,
        virtual_batches: VirtualBatches,
        dropout: DropoutKeys | None,
    ) -> None:
        """`model`: as Accelerate prepared it; `bare_model`: without DDP and torch.compile around it; `optimizer`: on
        which to call `step` and `zero_grad`; `verdict`: of the model's trial; `virtual_batches`: its BatchNorms;
        `dropout`: None unless its layers draw by sample."""
        self.config, self.accelerator, self.plan = config, accelerator, plan
        self.model, self.bare_model, self.optimizer, self.ema = model, bare_model, optimizer, ema
        self.verdict = verdict
        self.virtual_batches = virtual_batches if virtual_batches.modules else None
        self.dropout = dropout if dropout is not None and (dropout.layers or verdict.functions) else None
        # For models that call dropout as a function.
        self.around_forward: AbstractContextManager[Any] = (
            nullcontext() if dropout is None or not verdict.functions else KeyedFunctions(dropout)
        )
        # With --bitwise all virtual batches' gradients are summed so that no order matters, and DDP sums nothing.
        self.trained = [parameter for parameter in bare_model.parameters() if parameter.requires_grad]
        self.exact_gradients = ExactGradients(self.trained, plan.virtual_batches) if config.bitwise else None
        self.ddp_sums = not config.bitwise
        self.recomputes = models.prepare_recomputation(model, config.model)  # with gradient checkpointing
        self._before: list[BufferCopy] = []  # with --on-nonfinite skip: the buffers before the current update
        self._samples, self._padded = 0, False  # of the current update
        self._weights, self._ids = torch.empty(0), torch.empty(0)  # of the current micro-batch
        self.computed: list[Computed] = []
        """Of each micro-batch of the current update, for the guard."""

    def micro_batches(self, batches: Iterable[Batch], update: int, samples: int) -> Iterator[Batch]:
        """Yield those of the micro-batches of `update`, counted from 0, that this process computes.

        `samples`: how many samples the update has on all processes, without padding. Call `forward` and `backward` for
        each. After the last one the gradients are those of the mean over the samples, of all processes together.
        """
        self._samples, self._padded = samples, samples < self.config.batch_size
        self.computed = []
        if self.config.on_nonfinite == "skip":
            self._before = copy_buffers(self.bare_model)
        for number, batch in enumerate(batches):
            if not self.ddp_sums and self.plan.is_empty(self.accelerator.process_index, number):
                continue  # the processes cannot share the batch evenly, and no other waits for this one's gradients
            with self._summing():
                self._weights, self._ids = batch["weights"], batch["ids"]
                if self._is_idle():
                    continue
                # For random numbers that are not drawn by sample. Before the transform, which may be a user's own.
                by_virtual_batch = self.config.bitwise or bool(self.verdict.together)
                seed_pass(self.config.seed, self.accelerator, update, number, bitwise=by_virtual_batch)
                if self.dropout is not None:
                    ids = torch.from_numpy(batch["host_ids"])
                    self.dropout.set_samples(ids, update, self.accelerator.device)
                yield batch
        if self.exact_gradients is not None:
            self.exact_gradients.finish(max(1, samples))

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits, float [b, classes], of the current micro-batch's `inputs`, [b, channels, height, width]."""
        if self.verdict.together:
            return self._forward_of_real_samples(inputs)
        if self.virtual_batches is not None:
            self.virtual_batches.begin(self._weights, padded=self._padded, may_be_empty=self.plan.empty > 0)
        with self.around_forward:
            logits: Tensor = self.model(inputs)
        return logits

    def backward(self, losses: Tensor) -> None:
        """Add the gradients of the current micro-batch: `losses`, float [b], is 0 for padding."""
        # Accelerate will divide by the accumulation steps and DDP average over processes; multiply by both to cancel
        # that. Exact sums are divided at their end.
        processes = self.accelerator.num_processes if self.ddp_sums else 1
        scale = 1.0 if self.exact_gradients else self.plan.accumulation * processes / max(1, self._samples)
        with self.around_backward():
            self.accelerator.backward(losses.sum() * scale)
        if self.exact_gradients is not None:
            self.exact_gradients.add()
        self.computed.append(Computed(self._ids, losses.detach(), self._weights))

    def around_backward(self) -> AbstractContextManager[None]:
        """Around a backward pass: with gradient checkpointing it repeats forward passes, which must not count twice."""
        return kept_buffers(self.bare_model) if self.recomputes else nullcontext()

    def apply(self, update: int) -> None:
        """Let the optimizer take its step of `update`, counted from 1, and move statistics and EMA."""
        if self.virtual_batches is not None:
            self.virtual_batches.sum_processes()
        if self.config.model.freeze_epochs is not None:
            from accel_train.models.classifier import drop_frozen_gradients

            drop_frozen_gradients(self.bare_model)  # first, for clipping counts the norm of all gradients
        if self.config.optim.clip is not None:
            self.accelerator.unscale_gradients(self.optimizer)
            nn.utils.clip_grad_norm_(self.trained, self.config.optim.clip)
        self.optimizer.step()
        if self.virtual_batches is not None:
            self.virtual_batches.end_update()
        if self.ema is not None:
            from accel_train.optim.ema import update_ema

            update_ema(self.ema, self.bare_model, update)  # last, for it averages the statistics, too
        self.optimizer.zero_grad()

    def discard(self) -> None:
        """Skip the update: neither its gradients nor what its forward passes did to the buffers count."""
        restore_buffers(self._before)
        if self.virtual_batches is not None:
            self.virtual_batches.discard()
        self.optimizer.zero_grad()

    def _summing(self) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: DDP sums the gradients of all processes in an update's last one."""
        summing = self.accelerator.accumulate if self.ddp_sums else self.accelerator.no_sync
        around: AbstractContextManager[None] = summing(self.model)
        return around

    def _is_idle(self) -> bool:
        """Whether the micro-batch has no samples and need not be computed, because no other process waits for it."""
        waited_for = self.ddp_sums and self.accelerator.num_processes > 1
        return bool(self.verdict.together) and self._padded and not waited_for and not bool((self._weights > 0).any())

    def _forward_of_real_samples(self, inputs: Tensor) -> Tensor:
        """The logits of one virtual batch: those of its real samples, which may depend on each other, and zeros."""
        weights = self._weights
        if not (self._padded or self.plan.empty):
            if self.virtual_batches is not None:
                self.virtual_batches.begin(weights, padded=False, whole=True)
            return self.model(inputs)  # type: ignore[no-any-return]
        real = weights > 0
        has_samples = bool(real.any())
        # A pass without samples is only there because other processes wait for it.
        computed = inputs[real] if has_samples else inputs
        if self.virtual_batches is not None:
            self.virtual_batches.begin(
                weights[real] if has_samples else weights, padded=False, may_be_empty=not has_samples, whole=True
            )
        with nullcontext() if has_samples else kept_buffers(self.bare_model):
            logits: Tensor = self.model(computed)
        if not has_samples:
            return logits
        return logits.new_zeros(len(inputs), *logits.shape[1:]).index_put((real.nonzero()[:, 0],), logits)


# The guard against losses and gradients that are not finite.
#
# After the backward pass of an update each process checks on its device whether its losses and gradients are finite.
# One all-reduce (MAX of a single number, on the device) gives all processes the same answer. This works with DDP, with
# FSDP2, and if only one process has a bad loss. The host reads the answer at one of two times:
#
# * With `skip`, before the optimizer's step, which must not happen. On a GPU this waits for the device once per update.
# * With `stop`, one update later, when a GPU has long computed it. Nothing that a bad update did to weights, optimizer,
#   EMA and statistics is ever used: the host always reads the answer before anything is logged, saved or evaluated.
#
# With fp16, an overflow of the scaled gradients is normal: the scaler skips such updates and lowers its scale. It
# counts as an error if the scale has fallen below 1 or if the loss itself is not finite.


MOST_IN_A_ROW = 10  # skipped updates in a row: then the model is broken, not a sample


@dataclass
class CheckedUpdate:
    """The samples and losses of one update, on this process."""

    number: int  # of the update, counted from 1
    computed: list[Computed]
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
        """`model`: as Accelerate prepared it; `emit`: says what happens; `has_no_checkpoint`: whether the run has none,
        a collective call."""
        self.config, self.accelerator = config, accelerator
        self.emit, self.has_no_checkpoint = emit, has_no_checkpoint
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._one = torch.ones((), device=accelerator.device)
        self._unread: CheckedUpdate | None = None  # the previous update, if the host has not yet read its answer

    @torch.no_grad()
    def check_step(self, state: TrainState, computed: list[Computed]) -> bool:
        """Whether the optimizer may take its step. Call it after the last backward pass, with `Step.computed`.

        With skip it returns False for an update that is not finite, and raises UserError if too many in a row were
        not. With stop it returns True, and raises UserError if the previous update was not finite.
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

    def _find_bad(self, computed: list[Computed]) -> Tensor:
        """1 if this update must not count, else 0: float32 [] on the device, the same on all processes."""
        present = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        gradients = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in present]
        losses, scaler = [batch.losses for batch in computed], self.accelerator.scaler
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
        own: list[tuple[int, float]] = []
        for batch in checked.computed:  # none on a process that had only padding
            real = batch.weights > 0
            own += zip(batch.ids[real].tolist(), batch.losses[real].tolist(), strict=True)
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
