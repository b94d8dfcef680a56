"""Optimizer, learning-rate schedule, mean of the weights, clipping and loss, made by timm and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from timm.optim import Muon, create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from accel_train import config
from accel_train.data.splits import Splits
from accel_train.errors import UserError, nearest
from accel_train.models import classifier_names, input_names

# Torch's optimizers with a kernel for all parameters at once, and where they have it. On other devices torch
# takes its foreach form by itself.
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def create_optimizer(optim: config.Optim, model: nn.Module, *, sharded: bool = False) -> torch.optim.Optimizer:
    """The optimizer of those parameters of `model` that require gradients; `sharded`: FSDP2 will split them.

    The parameter groups are timm's: no weight decay on biases, norms and what the model itself excludes (with
    optim.decay_all only the latter), and with optim.layer_decay a group for each layer, with its factor
    `lr_scale` that only the schedules of `create_schedule` apply.

    Muon is for the hidden layers' weights (K. Jordan 2024, kellerjordan.github.io/posts/muon): first and last layer
    and embeddings go to timm's fallback, AdamW, as biases and norms do.
    """
    if optim.name not in list_optimizers():
        hint = nearest(optim.name, list_optimizers(), count=5)
        raise UserError(f"optim.name: timm has no optimizer {optim.name!r}.{hint}")
    info = get_optimizer_info(optim.name)
    if getattr(info, "second_order", False):
        raise UserError(f"optim.name: {optim.name} needs second derivatives, which this trainer does not make.")
    if optim.layer_decay is not None and not hasattr(model, "group_matcher"):
        raise UserError("optim.layer_decay: only timm's models name their layers; leave it out or take one of them.")
    options: dict[str, Any] = {}
    if optim.betas is not None:
        if not info.has_betas or info.num_betas != len(optim.betas):
            raise UserError(f"optim.betas: {optim.name} does not take {len(optim.betas)}; leave it out.")
        options["betas"] = optim.betas
    if optim.eps is not None:
        if not info.has_eps:
            raise UserError(f"optim.eps: {optim.name} has none; leave it out.")
        options["eps"] = optim.eps
    try:
        devices = {parameter.device.type for parameter in model.parameters()}
        kind = get_optimizer_class(optim.name, bind_defaults=False)
        # Only Adam's kernel takes split tensors.
        if kind in FUSED and devices <= set(FUSED_DEVICES) and not (sharded and kind is torch.optim.SGD):
            options["fused"] = True
        if kind is Muon:
            options["fallback_list"] = [f"{layer}.*" for layer in (*input_names(model), *classifier_names(model))]
            options["fallback_no_weight_decay"] = True  # what timm's models call so are their embeddings
        optimizer = create_optimizer_v2(
            model,
            opt=optim.name,
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            momentum=optim.momentum,
            filter_bias_and_bn=not optim.decay_all,
            layer_decay=optim.layer_decay,
            **options,
        )
        if options.get("fused") and kind is torch.optim.SGD and devices != {"cpu"}:
            optimizer.register_step_pre_hook(_zero_momentum)
    except (AssertionError, ImportError) as error:  # bitsandbytes or Apex
        raise UserError(f"optim.name: {optim.name} cannot be had here: {error}") from error
    except ValueError as error:  # a value out of the optimizer's own range
        raise UserError(f"optim: {optim.name} refuses its settings: {error}") from error
    return cast(torch.optim.Optimizer, optimizer)


def _zero_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Make the momentum of fused SGD before its first step, as zeros: so that step does what it would do anyhow.

    torch makes it of memory that nobody has written to, for the first step to fill. If the kernel leaves that step out
    (found_inf: an overflow under fp16, as happens at first, or a loss that is not finite) it would stay as it is.
    """
    for group in optimizer.param_groups:
        if group["momentum"]:
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


class PlateauScheduler(Scheduler):  # type: ignore[misc]
    """Decays the learning rate when the validation accuracy no longer rises.

    timm's own does not save its counters and will be removed. This one's state is a few numbers, from which
    the rate of any update follows. The rule is torch's ReduceLROnPlateau (mode max, threshold 0): the rate
    decays after the first evaluation that makes more than `patience` epochs without a better accuracy, counted
    from the best evaluation or from the last decay.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        decay: float,
        patience: int,
        min_lr: float,
        warmup_updates: int,
        warmup_lr: float,
    ) -> None:
        super().__init__(optimizer, param_group_field="lr", t_in_epochs=False)
        self.decay, self.patience, self.min_lr = decay, patience, min_lr
        self.warmup_updates, self.warmup_lr = warmup_updates, warmup_lr
        self.best: float | None = None
        self.bad_epochs = 0
        self.decays = 0
        # The epochs that were done at the last evaluation. None in a run whose checkpoint does not say so: earlier
        # versions counted evaluations in place of epochs, and such a run goes on as it began.
        self.epoch: int | None = 0

    def _get_lr(self, t: int) -> list[float]:
        if t < self.warmup_updates:
            return [self.warmup_lr + t * (base - self.warmup_lr) / self.warmup_updates for base in self.base_values]
        return [max(base * self.decay**self.decays, min(base, self.min_lr)) for base in self.base_values]

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Note the validation accuracy `metric` after `epoch` epochs; the next `step_update` acts on it."""
        if metric is None:
            return
        if self.best is None or metric > self.best:
            self.best, self.bad_epochs = metric, 0
        else:
            self.bad_epochs += 1 if self.epoch is None else epoch - self.epoch
        if self.epoch is not None:
            self.epoch = epoch
        if self.bad_epochs > self.patience:
            self.decays, self.bad_epochs = self.decays + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "bad_epochs": self.bad_epochs, "decays": self.decays, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.bad_epochs = state_dict["best"], state_dict["bad_epochs"]
        self.decays, self.epoch = state_dict["decays"], state_dict.get("epoch")


def check_schedule(schedule: config.Schedule, splits: Splits) -> None:
    """Raise UserError if the schedule follows a validation accuracy that this data does not give."""
    if schedule.name == "plateau" and splits.validation is None:
        raise UserError(
            "--schedule.name plateau: the learning rate follows the validation accuracy, but this data has no "
            "validation split: set one aside with --data.val-fraction 0.1, or choose another schedule."
        )


def create_schedule(
    schedule: config.Schedule, optimizer: torch.optim.Optimizer, *, epochs: int, updates_per_epoch: int
) -> Scheduler:
    """The learning rates of a run: `step_update(n)` sets those of update n, counted from 0 over all epochs.

    Call it before each update. The rates are a function of n alone, so that nothing needs to be saved; only
    plateau has a state (`state_dict`), which `step(epochs_done, validation_accuracy)` changes after an
    evaluation.

    During the warm-up the rate rises in a straight line from warmup_lr (at update 0). step, multistep and
    plateau count their epochs from the start of the run; cosine and poly fall from the end of the warm-up to
    min_lr at the end of the run.
    """
    warmup = round(schedule.warmup_epochs * updates_per_epoch)
    shared: dict[str, Any] = {"t_in_epochs": False, "warmup_t": warmup, "warmup_lr_init": schedule.warmup_lr}
    # At least 2: with 1 timm warns that the schedule has no effect, which a run of one update knows.
    fall = max(epochs * updates_per_epoch - warmup, 2)
    made: Scheduler
    if schedule.name == "constant":
        made = StepLRScheduler(optimizer, decay_t=1, decay_rate=1.0, warmup_prefix=False, **shared)
    elif schedule.name == "step":
        interval = max(round(schedule.step_epochs * updates_per_epoch), 1)
        made = StepLRScheduler(optimizer, decay_t=interval, decay_rate=schedule.decay, warmup_prefix=False, **shared)
    elif schedule.name == "multistep":
        # timm applies a milestone one index early (on purpose, says its source), and an index here is an
        # update.
        milestones = [epoch * updates_per_epoch + 1 for epoch in schedule.milestones]
        made = MultiStepLRScheduler(
            optimizer, decay_t=milestones, decay_rate=schedule.decay, warmup_prefix=False, **shared
        )
    elif schedule.name == "cosine":
        made = CosineLRScheduler(optimizer, t_initial=fall, lr_min=schedule.min_lr, warmup_prefix=True, **shared)
    elif schedule.name == "poly":
        made = PolyLRScheduler(
            optimizer,
            t_initial=fall,
            lr_min=schedule.min_lr,
            power=schedule.power,
            warmup_prefix=True,
            **shared,
        )
    else:
        made = PlateauScheduler(
            optimizer,
            decay=schedule.decay,
            patience=schedule.patience_epochs,
            min_lr=schedule.min_lr,
            warmup_updates=warmup,
            warmup_lr=schedule.warmup_lr,
        )
    made.step_update(0)  # the constructors leave out the groups' lr_scale
    return made


def create_ema(ema: config.Ema, model: nn.Module) -> ModelEmaV3 | None:
    """The running mean of the weights and buffers of `model` (unwrapped, on its device), if it is wanted.

    After each update call `update_ema`. Its `.module` is the averaged model.
    """
    return _Ema(model, decay=ema.decay, use_warmup=ema.warmup) if ema.enabled else None


class _Ema(ModelEmaV3):  # type: ignore[misc]
    """timm's, with one copy of all counters (BatchNorm's batches) in place of one of each: twenty kernels an update of
    ResNet-18 on a GPU."""

    def apply_update_(self, model: Any, decay: float) -> None:
        if not self.foreach:
            super().apply_update_(model, decay)
            return
        means: tuple[list[Tensor], list[Tensor]] = [], []
        counters: tuple[list[Tensor], list[Tensor]] = [], []
        for pair in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            lists = means if pair[0].is_floating_point() else counters
            lists[0].append(pair[0])
            lists[1].append(pair[1])
        self._foreach_lerp_(*means, weight=1.0 - decay)
        if counters[0]:
            torch._foreach_copy_(*counters)


def update_ema(ema: ModelEmaV3, model: nn.Module, updates: int) -> None:
    """Move the running mean towards the weights of `model` (unwrapped); after the first update it is these themselves.

    The mean is whole on every process, also under FSDP2, which splits the model: then all processes must call this.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        ema.foreach = False  # one tensor after the other: never all of them whole at once
        ema.update(_Whole(model), step=updates)
    else:
        ema.update(model, step=updates)


class _Whole:
    """What the running mean asks of a model, with its split tensors made whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> _Whole:
        return self

    def values(self) -> Iterator[Tensor]:
        for tensor in self.model.state_dict().values():
            yield tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_buffers(model: nn.Module) -> None:
    """Give all processes the main one's buffers: BatchNorm's statistics, which each counts on its own. Collective.

    DDP does so by itself before each forward pass, but nobody does under FSDP2, nor for an EMA.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def parameters_to_clip(optim: config.Optim, model: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients `clip_gradients` is to clip.

    All that are trained; for AGC without the classifier's (Brock et al. 2021, arxiv.org/abs/2102.06171,
    section 4.1).
    """
    heads = classifier_names(model) if optim.clip_mode == "agc" else ()
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not any(name.startswith(f"{head}.") for head in heads)
    ]


def clip_gradients(optim: config.Optim, parameters: Sequence[nn.Parameter]) -> None:
    """Clip the gradients in place as optim.clip and clip_mode say; those of fp16 must be unscaled before.

    Collective if FSDP2 has split the parameters.
    """
    if optim.clip is None:
        return
    if optim.clip_mode == "agc" and any(isinstance(parameter, DTensor) for parameter in parameters):
        _clip_split_adaptively(parameters, optim.clip)
    else:
        dispatch_clip_grad(parameters, optim.clip, mode=optim.clip_mode)


def _clip_split_adaptively(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """timm's `adaptive_clip_grad`, which does not take the split tensors of FSDP2.

    FSDP2 splits between rows, and AGC compares the norms of whole rows: each process clips its own. Biases and norms
    are compared as a whole; the norms of all of them are summed up at once.
    """
    vectors: list[tuple[DTensor, DTensor]] = []
    for parameter in parameters:
        weight, gradient = parameter.detach(), parameter.grad
        if not (isinstance(weight, DTensor) and isinstance(gradient, DTensor)):
            adaptive_clip_grad(parameter, factor)
        elif weight.ndim < 2:
            vectors.append((weight, gradient))
        else:
            rows = weight.to_local()
            rows.grad = gradient.to_local()
            adaptive_clip_grad(rows, factor)
    if vectors:
        norms = cast(DTensor, torch.stack([each.norm() for pair in vectors for each in pair])).full_tensor()
        limits, found = norms[0::2].clamp(min=1e-3) * factor, norms[1::2]  # 1e-3: timm's, as is the next number
        scales = torch.where(found < limits, 1.0, limits / found.clamp(min=1e-6))
        for (_, gradient), scale in zip(vectors, scales, strict=True):
            gradient.to_local().mul_(scale)


def create_loss(loss: config.Loss, class_weights: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
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
