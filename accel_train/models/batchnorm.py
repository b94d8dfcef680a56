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

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from accel_train.exact_sum import exact_sum


@dataclass
class Window:
    """What the layers have to know of the current forward pass. All layers of a model share one."""

    virtual_batch: int
    """Samples."""
    samples: int = 0
    """Of this forward pass; 0: BatchNorm is torch's own, over all samples together."""
    real: Tensor | None = None
    """float32 [samples], 0 for padding; None: all samples are real."""


class VirtualBatchNorm:
    """Mixed into a BatchNorm class: in training it normalises each virtual batch by itself."""

    window: Window
    statistics: Tensor
    """float32 [virtual batches, 3, channels] of this forward pass, a part of `VirtualBatches.current`: the sums over
    its calls of the mean, of the unbiased variance, and of 1 if they count."""
    calls: int
    """Of this forward pass, not compiled."""
    whole_calls: int
    """Those of them that wait for `VirtualBatches` to count them: torch's kernel does not."""

    def forward(self: Any, values: Tensor) -> Tensor:
        """The same as BatchNorm's, for values [samples * k, channels, ...] of k rows of each sample."""
        window = self.window
        if not self.training or not window.samples:
            return cast(Tensor, super().forward(values))  # type: ignore[misc]
        if len(values) % window.samples:  # nobody knows whose values these are: models/independence.py tells the user
            return cast(Tensor, super().forward(values))  # type: ignore[misc]
        rows = window.virtual_batch * (len(values) // window.samples)
        single = rows * values[0, 0].numel() == 1
        if window.real is None and not single and not torch.compiler.is_compiling():
            normalised = self._normalise_whole(values, rows)
        else:
            normalised = self._normalise_real(values, rows)
        return cast(Tensor, self._then(normalised))

    def _then(self: Any, values: Tensor) -> Tensor:
        return values

    def _normalise_whole(self: Any, values: Tensor, rows: int) -> Tensor:
        """Virtual batches without padding: torch's kernel for each, which also gives the statistics at no cost."""
        parts = torch.split(values, rows)
        statistics: Any = [(None, None)] * len(parts)
        first = recomputed = False
        if self.track_running_stats:
            first, recomputed = not self.calls, _is_recomputation()
            # With momentum 1 the kernel writes its statistics over the zeros, and autograd keeps the tensor.
            collected = self.statistics if first and not recomputed else torch.zeros_like(self.statistics)
            statistics = collected.unbind()
        normalised = [
            F.batch_norm(part, of_part[0], of_part[1], self.weight, self.bias, True, 1.0, self.eps)
            for part, of_part in zip(parts, statistics, strict=True)
        ]
        if self.track_running_stats and not recomputed:
            self.calls += 1
            self.whole_calls += 1
            if not first:
                self.statistics.data.add_(collected)
        return normalised[0] if len(parts) == 1 else torch.cat(normalised)

    def _normalise_real(self: Any, values: Tensor, rows: int) -> Tensor:
        """Virtual batches with padding, which is normalised but not counted; and what torch.compile records, in whose
        kernels the samples' weights cost nothing.

        A virtual batch with fewer than two real values per channel has no variance: as in evaluation it is normalised
        by the running statistics, and it does not count in them.
        """
        groups = values.view(-1, rows, *values.shape[1:]).to(torch.promote_types(values.dtype, torch.float32))
        shape = [groups.shape[0], rows] + [1] * (groups.ndim - 2)
        weights = groups.new_ones(shape)
        if self.window.real is not None:
            weights = self.window.real.repeat_interleave(len(values) // self.window.samples).view(shape).to(groups)
        summed = (1, *range(3, groups.ndim))
        count = weights.sum(1, keepdim=True) * groups[0, 0, 0].numel()
        mean = (groups * weights).sum(summed, keepdim=True) / count.clamp(min=1)
        variance = ((groups - mean).square() * weights).sum(summed, keepdim=True) / count.clamp(min=1)
        enough = count >= 2

        def per_channel(vector: Tensor) -> Tensor:
            return vector.view(1, 1, -1, *[1] * (groups.ndim - 3))

        if self.track_running_stats:
            compiled = torch.compiler.is_compiling()
            if compiled or not _is_recomputation():
                # All layers' statistics are parts of one tensor, of which autograd keeps those of other calls. `data`
                # does not tell it of a change that cannot matter: the kernel's gradient does not read them.
                statistics = self.statistics if compiled else self.statistics.data
                with torch.no_grad():
                    unbiased = variance * (count / (count - 1).clamp(min=1))
                    for row, each in enumerate((mean, unbiased, torch.ones_like(mean))):
                        statistics[:, row].add_(torch.where(enough, each, 0).flatten(1))
                if not compiled:
                    self.calls += 1
            mean = torch.where(enough, mean, per_channel(self.running_mean))
            variance = torch.where(enough, variance, per_channel(self.running_var))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * per_channel(self.weight)
        normalised = (groups - mean) * scale
        if self.bias is not None:
            normalised = normalised + per_channel(self.bias)
        return normalised.flatten(0, 1).to(values.dtype)


def _is_recomputation() -> bool:
    """Whether a backward pass is under way: gradient checkpointing calls a layer again (checked with torch 2.15)."""
    return torch._C._current_graph_task_id() != -1


class VirtualBatchNorm1d(VirtualBatchNorm, nn.BatchNorm1d):
    pass


class VirtualBatchNorm2d(VirtualBatchNorm, nn.BatchNorm2d):
    pass


class VirtualBatchNorm3d(VirtualBatchNorm, nn.BatchNorm3d):
    pass


class VirtualBatchNormAct2d(VirtualBatchNorm, BatchNormAct2d):  # type: ignore[misc]
    """timm's BatchNorm with an activation function after it."""

    def _then(self, values: Tensor) -> Tensor:
        return cast(Tensor, self.act(self.drop(values)))


VIRTUAL: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: VirtualBatchNorm1d,
    nn.BatchNorm2d: VirtualBatchNorm2d,
    nn.BatchNorm3d: VirtualBatchNorm3d,
    BatchNormAct2d: VirtualBatchNormAct2d,
}


def has_batchnorm(model: nn.Module) -> bool:
    """Whether the model has a BatchNorm that `VirtualBatches` would convert."""
    return any(type(module) in VIRTUAL for module in model.modules())


class VirtualBatches:
    """The BatchNorms of a model, over virtual batches, and the sums for their running statistics.

    All processes make the same calls: `begin` before each forward pass of an update, then `end_update` or `discard`.
    """

    def __init__(self, model: nn.Module, virtual_batch: int, exact: int | None = None) -> None:
        """Convert the BatchNorms of `model` (on its device, not yet wrapped) in place; the state dict stays the same.

        `virtual_batch`: samples. `exact`: the number of virtual batches of an update, if their statistics must be
        summed exactly, without order; a forward pass then has only one.

        It assigns `__class__`, as models/padding.py does: references to a module, hooks and parameters stay valid
        (checked with torch 2.15 and timm 1.0.31; tests/models/test_batchnorm.py).
        """
        self.modules = [module for module in model.modules() if type(module) in VIRTUAL]
        self.tracked: list[Any] = [module for module in self.modules if module.track_running_stats]
        first = self.tracked[0].running_mean if self.tracked else torch.empty(0)
        self.window = Window(virtual_batch)
        self._sizes = [len(module.running_mean) for module in self.tracked]
        self.current = first.new_zeros(0, 3, sum(self._sizes))
        """The statistics of the current forward pass: those of all layers, one after the other."""
        self._sums = first.new_zeros(3, sum(self._sizes))  # of the update's forward passes before this one
        self._exact = exact
        self._rows: list[Tensor] = []  # in place of the sums: what will be summed exactly
        for module in self.modules:
            module.__class__ = VIRTUAL[type(module)]
            module.window = self.window  # type: ignore[assignment]
        self._forget_calls()
        # A momentum of None is a mean over all updates.
        momentum = [1.0 if module.momentum is None else module.momentum for module in self.tracked]
        values = [value for value, size in zip(momentum, self._sizes, strict=True) for _ in range(size)]
        self._momentum = torch.tensor(values, device=first.device, dtype=first.dtype)

    def begin(self, real: Tensor, *, padded: bool) -> None:
        """Before a forward pass of an update. `real`: float32 [b], 0 for padding; `padded`: whether there is any in the
        whole update, on any process."""
        self._keep()
        self.window.samples, self.window.real = len(real), real if padded else None
        if not self.tracked:
            return
        count = len(real) // self.window.virtual_batch
        if len(self.current) != count:
            self.current = self.current.new_zeros(count, *self.current.shape[1:])
            for module, part in zip(self.tracked, torch.split(self.current, self._sizes, dim=2), strict=True):
                module.statistics = part
        self.current.zero_()

    def discard(self) -> None:
        """The update is skipped: its samples do not count."""
        self.window.samples, self.window.real = 0, None
        self._forget_calls()
        self._sums.zero_()
        self._rows.clear()

    def _keep(self) -> None:
        """Add the statistics of the last forward pass, or put them aside if they must not be added in this order."""
        if self.tracked and self.window.samples:
            self._count_calls()
            if self._exact is None:
                self._sums.add_(self.current.sum(0))
            else:
                self._rows.append(self.current.flatten(1).clone())
        self.window.samples = 0

    def _count_calls(self) -> None:
        """Write how often torch's kernel has collected the statistics of each layer: mostly once for all of them."""
        if all(module.whole_calls == 1 for module in self.tracked):
            self.current[:, 2].fill_(1)
        else:
            for module in self.tracked:
                if module.whole_calls:
                    module.statistics[:, 2].add_(module.whole_calls)
        self._forget_calls()

    def _forget_calls(self) -> None:
        for module in self.tracked:
            module.calls = module.whole_calls = 0

    @torch.no_grad()
    def end_update(self) -> None:
        """Update the running statistics by the sums of all processes. Collective."""
        counted = [module for module in self.tracked if module.training]  # a frozen body's statistics stay as they are
        if counted:
            self._keep()
            self._sum_processes()
            means, variances, counts = self._sums
            shares = self._momentum * (counts > 0)
            counts = counts.clamp(min=1)
            torch._foreach_add_([module.num_batches_tracked for module in counted], 1)
            self._move("running_mean", means / counts, shares)
            self._move("running_var", variances / counts, shares)
        self.discard()

    def _sum_processes(self) -> None:
        if self._exact is not None:
            self._sums.copy_(exact_sum(torch.cat(self._rows), self._exact).view_as(self._sums))
        elif dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self._sums)

    def _move(self, name: str, towards: Tensor, shares: Tensor) -> None:
        """Move a running statistic of all layers by `shares` of its distance to that of this update."""
        running, steps, factors = [], [], []
        parts = zip(self.tracked, torch.split(towards, self._sizes), torch.split(shares, self._sizes), strict=True)
        for module, new, share in parts:
            if module.training:
                running.append(getattr(module, name))
                steps.append(new)
                factors.append(share if module.momentum is not None else share / module.num_batches_tracked)
        steps = list(torch._foreach_sub(steps, running))
        torch._foreach_mul_(steps, factors)
        torch._foreach_add_(running, steps)
