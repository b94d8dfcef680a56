"""The training loss. Another loss is added here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_train.config.schema import Loss


def create_loss(loss: Loss, class_weights: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss: (logits [b, C], target int64 [b] or probabilities float [b, C]) to float32 [b].

    The loss of each sample, with its target smoothed (Szegedy et al. 2016, arxiv.org/abs/1512.00567), times the weight
    of its class: `class_weights` float32 [C], on the device of the logits; for mixed targets the mean of the weights
    by the target. The caller takes the mean over samples, so the weights should have mean 1 over them.
    """
    losses_of = {"cross_entropy": _cross_entropy, "binary_cross_entropy": _binary_cross_entropy}[loss.name]

    def per_sample(logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 would lose digits
        mixed = target.is_floating_point()
        if mixed:
            target = target.to(logits)
        losses = losses_of(logits, target, loss.label_smoothing)
        if class_weights is None:
            return losses
        return losses * (target @ class_weights if mixed else class_weights[target])

    return per_sample


def _cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)


def _binary_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Each class against all others, the mean over the classes (Wightman et al. 2021, arxiv.org/abs/2110.00476)."""
    classes = logits.shape[1]
    probabilities = target if target.is_floating_point() else F.one_hot(target, classes).to(logits.dtype)
    smoothed = probabilities * (1 - smoothing) + smoothing / classes
    return F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none").mean(1)


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weights float32 [num_classes], inverse to the frequency of each class in `labels` int64 [n].

    Their mean over the samples is 1. A class without samples has weight 0: nothing is ever multiplied by it.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    present = counts > 0
    weights = labels.numel() / (present.sum() * counts.clamp(min=1)).double()
    return torch.where(present, weights, 0.0).float()
