"""BatchNorm over virtual batches: the same statistics on any number of processes.

BatchNorm normalises by the mean and the variance of the samples that are computed together. In plain data-parallel
training these are the micro-batch of one process, so another number of processes trains another model. Here they are a
*virtual batch*: a fixed number of consecutive samples of the update's batch, which one process computes, whichever it
is. Hoffer et al. 2017 (arxiv.org/abs/1705.08741) call this Ghost Batch Normalization, and find that it generalises
better than statistics of a large batch.

The running statistics, which evaluation uses, are updated once per update, by the mean over its virtual batches on all
processes, and over all calls of a layer that a forward pass calls several times. Padding never counts, nor does a call
that gradient checkpointing repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.compat import backward_pass
from accel_train.exact_sum import exact_sum
from accel_train.models.batchnorm_kernels import is_fused, normalise, per_channel
from accel_train.models.wrapping import library_layer


class VirtualBatches:
    """The BatchNorms of a model, over virtual batches, and the sums for their running statistics.

    `begin` comes before each forward pass of an update, `sum_processes` after the last one, then `end_update` or
    `discard`.
    """

    def __init__(self, model: nn.Module, virtual_batch: int, exact: int | None = None) -> None:
        """Convert the BatchNorms of `model` (on its device, not yet wrapped) in place; the state dict stays the same.

        `virtual_batch`: samples. `exact`: the number of virtual batches of an update, if their statistics must be
        summed exactly, without order; a forward pass then has only one.

        It assigns `__class__`, as optim/performance.py does: references to a module, hooks and parameters stay valid
        (tests/models/test_batchnorm.py).
        """
        self.modules = [module for module in model.modules() if virtual_class(type(module)) is not None]
        self.tracked: list[Any] = [module for module in self.modules if module.track_running_stats]
        first = self.tracked[0].running_mean if self.tracked else torch.empty(0)
        self._virtual_batch, self.forward_pass = virtual_batch, ForwardPass(virtual_batch)
        self._sizes = [len(module.running_mean) for module in self.tracked]
        # Of the current forward pass, one tensor a layer: if they were parts of one, torch.compile would take them for
        # one input that a graph changes, and skip CUDA graphs because that input is not static.
        self._statistics: list[Tensor] = []
        self._sums = first.new_zeros(3, sum(self._sizes))  # of the update's forward passes before this one
        self._exact = exact
        self._rows: list[Tensor] = []  # in place of the sums: what will be summed exactly
        for module in self.modules:
            module.__class__ = virtual_class(type(module))  # type: ignore[assignment]
            module.forward_pass = self.forward_pass  # type: ignore[assignment]
        self._forget_calls()
        # A momentum of None is a mean over all updates in which the layer was called.
        self._momentum = self._per_channel(
            [1.0 if module.momentum is None else module.momentum for module in self.tracked]
        )
        starts = [sum(self._sizes[:number]) for number in range(len(self._sizes))]
        self._first_channels = torch.tensor(starts, dtype=torch.long, device=first.device)
        self._may_be_empty = False
        self._all_called = False  # in this update, as the host knows without waiting for the counts
        self._calls: list[int] = []
        self._calls_per_channel = self._momentum  # of `self._calls`, once there are any

    def begin(self, real: Tensor, *, padded: bool, may_be_empty: bool = False, whole: bool = False) -> None:
        """Before a forward pass of an update. `real`: float32 [b], 0 for padding; `padded`: whether there is any in the
        whole update, on any process. Without, a virtual batch can still be empty as a whole if `may_be_empty`: it is
        normalised as the real ones, by the same kernels, but does not count. `whole`: the pass is one virtual batch,
        however many samples it has."""
        self._keep()
        self.forward_pass.virtual_batch = len(real) if whole else self._virtual_batch
        self._may_be_empty = may_be_empty and not padded
        self.forward_pass.samples, self.forward_pass.padded, self.forward_pass.real = len(real), padded, real
        if not self.tracked:
            return
        count = len(real) // self.forward_pass.virtual_batch
        if not self._statistics or len(self._statistics[0]) != count:
            self._statistics = [self._sums.new_zeros(count, 3, size) for size in self._sizes]
            for module, statistics in zip(self.tracked, self._statistics, strict=True):
                module.statistics = statistics
        torch._foreach_zero_(self._statistics)

    def discard(self) -> None:
        """The update is skipped: its samples do not count."""
        self.forward_pass.samples = 0
        self._all_called = False
        self._forget_calls()
        self._sums.zero_()
        self._rows.clear()

    def _keep(self) -> None:
        """Add the statistics of the last forward pass, or put them aside if they must not be added in this order."""
        if self.tracked and self.forward_pass.samples:
            current = self.current
            self._add_waiting(current)
            self._count_calls(current)
            if self._may_be_empty and self.forward_pass.real is not None:
                current.mul_(self.forward_pass.real.view(len(current), -1)[:, :1, None])
            if self._exact is None:
                self._sums.add_(current[0] if len(current) == 1 else current.sum(0))
            else:
                self._rows.append(current.flatten(1))
        self.forward_pass.samples = 0

    @property
    def current(self) -> Tensor:
        """A copy of the layers' statistics of the current forward pass, one layer after the other: float32 [virtual
        batches, 3, channels]."""
        return torch.cat(self._statistics, 2)

    def _add_waiting(self, current: Tensor) -> None:
        """Add the statistics that the layers have put aside: one call of each layer at a time, all layers together."""
        while any(module.waiting for module in self.tracked):
            calls = [
                module.waiting.pop() if module.waiting else (torch.zeros_like(module.statistics[:, 0]),) * 2
                for module in self.tracked
            ]
            for row, statistics in enumerate(zip(*calls, strict=True)):
                current[:, row].add_(torch.cat(statistics, 1))

    def _count_calls(self, current: Tensor) -> None:
        """Add how often each layer was called without padding. Mostly that is as often as in the pass before."""
        calls = [module.whole_calls for module in self.tracked]
        self._all_called |= not self._may_be_empty and all(calls)
        if any(calls):
            if calls != self._calls:
                self._calls, self._calls_per_channel = calls, self._per_channel(calls)
            current[:, 2].add_(self._calls_per_channel)
        self._forget_calls()

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        """One value of each tracked layer, for all of its channels."""
        spread = torch.tensor(values, dtype=self._sums.dtype).repeat_interleave(torch.tensor(self._sizes).long())
        return spread.to(self._sums.device)

    def _forget_calls(self) -> None:
        for module in self.tracked:
            module.calls = module.whole_calls = 0
            module.waiting = []

    @torch.no_grad()
    def sum_processes(self) -> None:
        """Replace the sums of an update by those of all processes. Collective."""
        if not self._is_training:
            return
        self._keep()
        if self._exact is not None:
            rows = torch.cat(self._rows) if self._rows else self._sums.new_zeros(0, self._sums.numel())
            self._sums.copy_(exact_sum(rows, self._exact).view_as(self._sums))
        elif dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)

    @property
    def _is_training(self) -> bool:
        return any(module.training for module in self.tracked)  # a frozen body's statistics stay as they are

    @torch.no_grad()
    def end_update(self) -> None:
        """Update the running statistics by the sums."""
        if self._is_training:
            means, variances, counts = self._sums
            shares = self._momentum * (counts > 0)
            self._count_updates(counts)
            counts = counts.clamp(min=1)
            self._move("running_mean", means / counts, shares)
            self._move("running_var", variances / counts, shares)
        self.discard()

    def _count_updates(self, counts: Tensor) -> None:
        """Count this update for each layer that is not frozen and was called. `counts`: calls, of each channel."""
        trained = [module.training for module in self.tracked]
        tracked = [module.num_batches_tracked for module in self.tracked if module.training]
        if self._all_called:
            torch._foreach_add_(tracked, 1)
            return
        called = (counts[self._first_channels] > 0).long().unbind()
        torch._foreach_add_(tracked, [once for once, counted in zip(called, trained, strict=True) if counted])

    def _move(self, name: str, towards: Tensor, shares: Tensor) -> None:
        """Move a running statistic of all layers by `shares` of its distance to that of this update."""
        running, steps, factors = [], [], []
        parts = zip(self.tracked, torch.split(towards, self._sizes), torch.split(shares, self._sizes), strict=True)
        for module, new, share in parts:
            if module.training:
                running.append(getattr(module, name))
                steps.append(new)
                if module.momentum is None:
                    share = share / module.num_batches_tracked.clamp(min=1)
                factors.append(share)
        steps = list(torch._foreach_sub(steps, running))
        torch._foreach_mul_(steps, factors)
        torch._foreach_add_(running, steps)


@dataclass
class ForwardPass:
    """What the layers have to know of the current forward pass. All layers of a model share one."""

    virtual_batch: int
    """Samples."""
    samples: int = 0
    """Of this forward pass; 0: BatchNorm is torch's own, over all samples together."""
    padded: bool = False
    """Whether the update has padding."""
    real: Tensor | None = None
    """float32 [samples], 0 for padding."""


class VirtualBatchNorm:
    """Mixed into a BatchNorm class: in training it normalises each virtual batch by itself."""

    forward_pass: ForwardPass
    statistics: Tensor
    """float32 [virtual batches, 3, channels] of this forward pass: the sums over its calls of the mean, of the unbiased
    variance, and of 1 if they count."""
    calls: int
    """Of this forward pass, not compiled."""
    whole_calls: int
    """Those of them that wait for `VirtualBatches` to count them, for all layers together."""
    waiting: list[tuple[Tensor, Tensor]]
    """Means and variances of calls with several virtual batches, [virtual batches, channels], that wait, too."""
    activates = False
    """Whether it is timm's, with an activation function after it."""

    def forward(self: Any, values: Tensor) -> Tensor:
        """The same as BatchNorm's, for values [samples * k, channels, ...] of k rows of each sample."""
        now = self.forward_pass
        if not self.training or not now.samples:
            return cast(Tensor, super().forward(values))  # type: ignore[misc]
        if len(values) % now.samples:
            normalised = self._normalise_together(values)
        else:
            normalised = self._normalise_batches(values, now.virtual_batch * (len(values) // now.samples))
        if self.activates:
            normalised = self.act(self.drop(normalised))
        return cast(Tensor, normalised)

    def _normalise_batches(self: Any, values: Tensor, rows: int) -> Tensor:
        """Each `rows` of the values by itself."""
        single = rows * values[0, 0].numel() == 1
        # The first question comes first: torch.compile would record two graphs, with and without padding.
        if torch.compiler.is_compiling() or self.forward_pass.padded or single:
            return cast(Tensor, self._normalise_real(values, rows))
        if rows == len(values) or is_fused(values):
            return cast(Tensor, self._normalise_at_once(values, rows))
        normalised, mean, variance = normalise(values, rows, self.weight, self.bias, self.eps)
        if self.track_running_stats and not _is_recomputation():
            self.waiting.append((mean, variance))
            self._count_whole()
        return normalised

    def _normalise_at_once(self: Any, values: Tensor, rows: int) -> Tensor:
        """Without padding, by a kernel that also gives the statistics: torch's of one virtual batch, as each pass of
        `--bitwise` has, ours of several."""
        collected = mean = variance = None
        directly = self.track_running_stats and not self.calls and not _is_recomputation()
        if self.track_running_stats:
            # With momentum 1 torch's kernel writes its statistics over the zeros, and autograd keeps the tensor.
            collected = self.statistics if directly else torch.zeros_like(self.statistics)
            mean, variance = collected[0, 0], collected[0, 1]
        if rows == len(values):
            normalised = F.batch_norm(values, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        else:
            from accel_train.models.batchnorm_triton import Fused  # needs Triton, which is there if `is_fused`

            normalised = Fused.apply(values, rows, self.weight, self.bias, self.eps, collected)
        if self.track_running_stats and not _is_recomputation():
            self._count_whole()
            if not directly:
                self.statistics.data.add_(collected)
        return normalised

    def _count_whole(self: Any) -> None:
        self.calls += 1
        self.whole_calls += 1

    def _normalise_real(self: Any, values: Tensor, rows: int) -> Tensor:
        """Virtual batches with padding, which is normalised but not counted; and what torch.compile records, in whose
        kernels the samples' weights cost nothing.

        A virtual batch with fewer than two real values per channel has no variance: as in evaluation it is normalised
        by the running statistics, and it does not count in them.
        """
        groups = values.view(-1, rows, *values.shape[1:]).to(torch.promote_types(values.dtype, torch.float32))
        shape = [groups.shape[0], rows] + [1] * (groups.ndim - 2)
        weights = (
            self.forward_pass.real.repeat_interleave(len(values) // self.forward_pass.samples).view(shape).to(groups)
        )
        summed = (1, *range(3, groups.ndim))
        count = weights.sum(1, keepdim=True) * groups[0, 0, 0].numel()
        mean = (groups * weights).sum(summed, keepdim=True) / count.clamp(min=1)
        variance = ((groups - mean).square() * weights).sum(summed, keepdim=True) / count.clamp(min=1)
        enough = count >= 2
        if self.track_running_stats:
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                rows_of_call = (mean, unbiased, torch.ones_like(mean))
                self._collect([torch.where(enough, each, 0).flatten(1) for each in rows_of_call])
            mean = torch.where(enough, mean, per_channel(self.running_mean, groups))
            variance = torch.where(enough, variance, per_channel(self.running_var, groups))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * per_channel(self.weight, groups)
        normalised = (groups - mean) * scale
        if self.bias is not None:
            normalised = normalised + per_channel(self.bias, groups)
        result: Tensor = normalised.flatten(0, 1).to(values.dtype)
        return result

    def _normalise_together(self: Any, values: Tensor) -> Tensor:
        """Values that are no virtual batch's own: their statistics count once for each virtual batch."""
        mean = variance = None
        if self.track_running_stats:
            mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        # With momentum 1 the kernel writes its statistics over the zeros.
        normalised = F.batch_norm(values, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if mean is not None and variance is not None:
            self._collect([mean, variance, torch.ones_like(mean)])
        return normalised

    def _collect(self: Any, rows: Sequence[Tensor]) -> None:
        """Add a call's means, variances and counts, [virtual batches, channels] or [channels], to the statistics."""
        compiled = torch.compiler.is_compiling()
        if not compiled and _is_recomputation():
            return
        # Autograd keeps the statistics of the first call. `data` does not tell it of a change that cannot matter: the
        # kernel's gradient does not read them.
        statistics = self.statistics if compiled else self.statistics.data
        for row, values in enumerate(rows):
            statistics[:, row].add_(values)
        if not compiled:
            self.calls += 1


def _is_recomputation() -> bool:
    """Whether a backward pass is under way: gradient checkpointing calls a layer again."""
    return backward_pass() is not None


VIRTUAL: dict[type[nn.Module], type[nn.Module]] = {}
"""The classes that were replaced, and by what."""


def virtual_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class by which `VirtualBatches` replaces a BatchNorm of this class; None for other layers."""
    activates = kind is library_layer("timm.layers", "BatchNormAct2d")
    if kind not in VIRTUAL and (activates or kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        VIRTUAL[kind] = type(f"Virtual{kind.__name__}", (VirtualBatchNorm, kind), {"activates": activates})
    return VIRTUAL.get(kind)


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model has a BatchNorm that `VirtualBatches` would convert."""
    return any(virtual_class(type(module)) is not None for module in model.modules())
