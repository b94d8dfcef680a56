"""The BatchNorm layers: in training each normalises virtual batches, and collects the statistics of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel_train.launch.compat import backward_pass
from accel_train.models.batchnorm.normalise import is_fused, normalise, per_channel
from accel_train.models.libraries import library_layer


@dataclass
class Window:
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

    window: Window
    statistics: Tensor
    """float32 [virtual batches, 3, channels] of this forward pass: the sums over its calls of the mean, of the unbiased
    variance, and of 1 if they count."""
    calls: int
    """Of this forward pass, not compiled."""
    whole_calls: int
    """Those of them that wait for `VirtualBatches` to count them, for all layers together."""
    waiting: list[tuple[Tensor, Tensor]]
    """Means and variances of calls with several virtual batches, [virtual batches, channels], that wait, too."""
    of_no_sample = False
    """Whether its values are the same for any samples, such as learned prototypes."""
    activates = False
    """Whether it is timm's, with an activation function after it."""

    def forward(self: Any, values: Tensor) -> Tensor:
        """The same as BatchNorm's, for values [samples * k, channels, ...] of k rows of each sample."""
        window = self.window
        if not self.training or not window.samples:
            return cast(Tensor, super().forward(values))  # type: ignore[misc]
        if self.of_no_sample or len(values) % window.samples:
            normalised = self._normalise_together(values)
        else:
            normalised = self._normalise_batches(values, window.virtual_batch * (len(values) // window.samples))
        if self.activates:
            normalised = self.act(self.drop(normalised))
        return cast(Tensor, normalised)

    def _normalise_batches(self: Any, values: Tensor, rows: int) -> Tensor:
        """Each `rows` of the values by itself."""
        single = rows * values[0, 0].numel() == 1
        # The first question comes first: torch.compile would record two graphs, with and without padding.
        if torch.compiler.is_compiling() or self.window.padded or single:
            return cast(Tensor, self._normalise_real(values, rows))
        if rows == len(values) or is_fused(values):
            return cast(Tensor, self._normalise_at_once(values, rows))
        normalised, mean, variance = normalise(values, rows, self.weight, self.bias, self.eps)
        if self.track_running_stats and not _is_recomputation():
            self.waiting.append((mean, variance))
            self._count_whole()
        return normalised

    def _normalise_at_once(self: Any, values: Tensor, rows: int) -> Tensor:
        """Without padding, by a kernel that also gives the statistics: torch's of one virtual batch, ours of several.

        Each pass of `--bitwise` has one: tests/models/test_batchnorm_bits.py holds its bits.
        """
        collected = mean = variance = None
        directly = self.track_running_stats and not self.calls and not _is_recomputation()
        if self.track_running_stats:
            # With momentum 1 torch's kernel writes its statistics over the zeros, and autograd keeps the tensor.
            collected = self.statistics if directly else torch.zeros_like(self.statistics)
            mean, variance = collected[0, 0], collected[0, 1]
        if rows == len(values):
            normalised = F.batch_norm(values, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        else:
            from accel_train.models.batchnorm.fused import Fused  # needs Triton, which is there if `is_fused`

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
        weights = self.window.real.repeat_interleave(len(values) // self.window.samples).view(shape).to(groups)
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
