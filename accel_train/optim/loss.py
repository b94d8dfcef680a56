"""The training loss. Another loss is added here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from accel_train.config.schema import Loss


def create_loss(loss: Loss, class_weights: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss: (logits [b, C], target int64 [b] or probabilities float [b, C]) to float32 [b].

    Cross-entropy of each sample, with the targets smoothed (Szegedy et al. 2016) and then multiplied by the
    weight of the sample's class: `class_weights` float32 [C], on the device of the logits; for mixed targets
    the mean of the weights by the target. The caller takes the mean over samples, so the weights should have
    mean 1 over them.
    """

    def per_sample(logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float()
        mixed = target.is_floating_point()
        if mixed:
            target = target.float()
        losses = F.cross_entropy(logits, target, reduction="none", label_smoothing=loss.label_smoothing)
        if class_weights is None:
            return losses
        return losses * (target @ class_weights if mixed else class_weights[target])

    return per_sample


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weights float32 [num_classes], inverse to the frequency of each class in `labels` int64 [n].

    Their mean over the samples is 1. A class without samples has weight 0: nothing is ever multiplied by it.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    present = counts > 0
    weights = labels.numel() / (present.sum() * counts.clamp(min=1)).double()
    return torch.where(present, weights, 0.0).float()
