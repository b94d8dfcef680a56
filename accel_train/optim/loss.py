"""The training loss. Another loss is added here."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_train.config.schema import Loss
from accel_train.errors import UserError
from accel_train.task import SEVERAL_LABELS, Task, task_of
from accel_train.user_code import Reference, parse_reference

LossOfSamples = Callable[[Tensor, Tensor, Loss], Tensor]
"""(logits [b, C], target, options) to losses [b]."""


def create_loss(loss: Loss, class_weights: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss: (logits [b, C], target int64 [b] or probabilities float [b, C]) to float32 [b].

    Of data with several labels an image the target is 1 for each of them.

    The loss of each sample, with its target smoothed (Szegedy et al. 2016, arxiv.org/abs/1512.00567), times the weight
    of its class: `class_weights` float32 [C], on the device of the logits; for mixed targets the mean of the weights
    by the target. The caller takes the mean over samples, so the weights should have mean 1 over them. Raises UserError
    if a user's own loss cannot be loaded.
    """
    reference = parse_reference("loss.name", loss.name)
    losses_of = LOSSES[loss.name] if reference is None else _users_loss(reference)

    def per_sample(logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 would lose digits
        mixed = target.is_floating_point()
        if mixed:
            target = target.to(logits)
        losses = losses_of(logits, target, loss)
        if class_weights is None:
            return losses
        weights = class_weights.to(losses)
        return losses * (target.to(losses) @ weights if mixed else weights[target])

    return per_sample


def _users_loss(reference: Reference) -> LossOfSamples:
    """The user's function of (logits, targets). It raises UserError unless it returns a loss for each sample."""
    from accel_train.user_code import load, showing_user_lines

    where = f"--loss.name {reference.short}"
    function = load("loss.name", reference)
    if isinstance(function, nn.Module):  # an object of a program, which may have weights of classes
        function = copy.deepcopy(function)

    def losses(logits: Tensor, target: Tensor, *_: object) -> Tensor:
        if isinstance(function, nn.Module):
            function.to(logits.device)
        with showing_user_lines("loss.name", reference):
            values = function(logits, target)
        if not isinstance(values, Tensor) or values.shape != logits.shape[:1] or not values.is_floating_point():
            found = f"{str(values.dtype)[6:]} {list(values.shape)}" if isinstance(values, Tensor) else type(values)
            raise UserError(
                f"{where}: returned {found} for the logits of {len(logits)} samples; expected a float for each sample, "
                f'[{len(logits)}]: leave out the mean, as with reduction="none".'
            )
        return values.float()

    return losses


def check_task(loss: Loss, task: Task) -> None:
    """Raise UserError unless the loss can be computed for the task's labels."""
    if loss.name in {*LOSSES} - {SEVERAL_LABELS.loss}:
        task.check_one_label(f"--loss.name {loss.name}", "use --loss.name bce.")
    if loss.class_weights != "none":
        task.check_one_label(f"--loss.class-weights {loss.class_weights}", "use none.")


def create_checked_loss(
    loss: Loss, labels: Tensor, classes: int, device: torch.device, *, mixes: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss for samples with `labels`, on `device`: see `create_loss`, `check_task` and `check_loss`."""
    check_task(loss, task_of(labels))
    weights = balanced_class_weights(labels, classes).to(device) if loss.class_weights == "balanced" else None
    criterion = create_loss(loss, weights)
    check_loss(loss, criterion, classes, device, task_of(labels), mixes=mixes)
    return criterion


def check_loss(
    loss: Loss,
    criterion: Callable[[Tensor, Tensor], Tensor],
    classes: int,
    device: torch.device,
    task: Task,
    *,
    mixes: bool,
) -> None:
    """Try a user's own loss with random logits of 4 samples. Raises UserError if it cannot be trained with.

    `mixes`: whether targets are probabilities, too. The loss of a sample must not depend on the other samples: another
    number of processes would have other ones beside it.
    """
    reference = parse_reference("loss.name", loss.name)
    if reference is None:
        return
    where = f"--loss.name {reference.short}"
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, classes, generator=generator).to(device).requires_grad_()
    labels = torch.arange(4, device=device) % classes
    mixed = F.one_hot(labels, classes) * 0.7 + 0.3 / classes
    targets = [task.example_targets(4, classes).to(device), *[mixed] * mixes]
    for target in targets:
        losses = criterion(logits, target)
        if not losses.requires_grad:
            raise UserError(f"{where}: the loss has no gradient; compute it from the logits, without detach().")
        halves = torch.cat([criterion(logits[:2], target[:2]), criterion(logits[2:], target[2:])])
        if not torch.allclose(losses, halves, rtol=1e-4, atol=1e-6):
            raise UserError(
                f"{where}: the loss of a sample depends on the other samples beside it, so that another number of "
                "processes would learn something else. Compute each sample's loss from its own logits."
            )


def _cross_entropy(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none", label_smoothing=loss.label_smoothing)


def _binary_cross_entropy(logits: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """Each class against all others, the mean over the classes (Wightman et al. 2021, arxiv.org/abs/2110.00476).

    As timm's BinaryCrossEntropy: a target t is smoothed to t (1 - smoothing) + smoothing / classes. With a threshold
    it then becomes 1 above it, else 0.
    """
    classes, smoothing = logits.shape[1], loss.label_smoothing
    probabilities = target if target.is_floating_point() else F.one_hot(target, classes).to(logits.dtype)
    smoothed = probabilities * (1 - smoothing) + smoothing / classes
    if loss.bce_target_threshold is not None:
        smoothed = (smoothed > loss.bce_target_threshold).to(smoothed.dtype)
    return F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none").mean(1)


LOSSES: dict[str, LossOfSamples] = {"cross_entropy": _cross_entropy, "binary_cross_entropy": _binary_cross_entropy}
"""By --loss.name. config/declaration.py has the same names, to check the option before torch is imported."""


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weights float32 [num_classes], inverse to the frequency of each class in `labels` int64 [n].

    Their mean over the samples is 1. A class without samples has weight 0: nothing is ever multiplied by it.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    present = counts > 0
    weights = labels.numel() / (present.sum() * counts.clamp(min=1)).double()
    return torch.where(present, weights, 0.0).float()
