"""The options of the training, and how an option is declared.

The fields of each group are keys of a recipe and of the command line.

All that there is to say about an option is said here, once: its type, bounds (POSITIVE, …), whether it may change when
a run goes on (Free, …), its default, and its help text in the string under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from accel_train.config.declaration import (
    ALL_POSITIVE,
    ENDING,
    ENDS_RUN,
    FALLING,
    FRACTION,
    JSON_OBJECT,
    LOSS_NAME,
    MILESTONES,
    NEEDS_EMA,
    NEEDS_WARMUP,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SCHEDULE_NAME,
    STARTS_IN_EPOCH,
    WITHOUT_MOMENTUM,
    Free,
    Needs,
)


@dataclass(frozen=True)
class Optim:
    name: str = "sgd"
    """A timm optimizer: sgd (Nesterov), momentum (plain SGD), adam, adamw, lamb, lion, muon (hidden layers), …; or your
    own FILE.py:FUNCTION of the parameter groups."""
    lr: Annotated[float, NOT_NEGATIVE] = 0.1
    """Learning rate for the whole batch, on any number of processes."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight decay; not for norms and biases, unless optim.decay-all is set."""
    decay_all: Annotated[bool, Needs("optim.weight-decay")] = False
    """Apply weight decay to all weights, norms and biases too, as plain torch.optim does."""
    norm_weight_decay: Annotated[float | None, NOT_NEGATIVE] = None
    """Weight decay of norms, weights and biases; default: see optim.decay-all."""
    momentum: Annotated[float, FRACTION, Needs("optim.name", not_values=WITHOUT_MOMENTUM)] = 0.9
    """Momentum, for optimizers that have it."""
    betas: tuple[float, float] | None = None
    """Betas of Adam and similar optimizers; default: the optimizer's."""
    eps: Annotated[float | None, POSITIVE] = None
    """Epsilon; default: the optimizer's."""
    kwargs: Annotated[str | None, JSON_OBJECT] = None
    """More arguments of the optimizer, as JSON: '{"amsgrad": true}'. In a recipe also as a mapping."""
    layer_decay: Annotated[float | None, FRACTION] = None
    """Learning rate of each layer, as a multiple (0 to 1) of the next layer's."""
    head_lr: Annotated[float | None, NOT_NEGATIVE] = None
    """Learning rate of the last layer, if another; the schedule changes both in the same proportion."""
    clip: Annotated[
        float | None,
        POSITIVE,
    ] = None
    """Clip gradients to this value; see optim.clip-mode."""
    clip_mode: Annotated[Literal["norm", "value", "agc"], Needs("optim.clip")] = "norm"
    """Clip by the norm of all gradients, by value, or by the norm of each weight (AGC)."""


@dataclass(frozen=True)
class Schedule:
    name: Annotated[str, SCHEDULE_NAME] = "constant"
    """Learning rate after the warm-up: constant, cosine, step, multistep, poly, one_cycle, plateau; or your own factor
    of it, FILE.py:FUNCTION of (epoch, epochs). All but plateau depend on the update number alone."""
    per: Literal["update", "epoch"] = "update"
    """Change the learning rate at each update, or only where an epoch begins, as timm and torchvision do by default."""
    warmup_epochs: Annotated[
        float,
        NOT_NEGATIVE,
    ] = 0.0
    """Epochs in which the learning rate rises from schedule.warmup-lr to optim.lr."""
    warmup_lr: Annotated[float, NOT_NEGATIVE, NEEDS_WARMUP] = 0.0
    """Learning rate at the start of the warm-up."""
    warmup_prefix: Annotated[bool, NEEDS_WARMUP, Needs("schedule.name", ("cosine", "poly"))] = True
    """cosine, poly: fall from the end of the warm-up on; false: as if from the start (timm's default)."""
    min_lr: Annotated[float, NOT_NEGATIVE, Needs("schedule.name", (*FALLING, "plateau"))] = 0.0
    """cosine, poly, one_cycle, plateau: lowest learning rate."""
    step_epochs: Annotated[
        float,
        POSITIVE,
        Needs("schedule.name", ("step",)),
        STARTS_IN_EPOCH,
    ] = 30.0
    """step: epochs from one decay to the next, counted from the start of the run."""
    milestones: Annotated[
        tuple[int, ...],
        MILESTONES,
        Needs("schedule.name", ("multistep",)),
        STARTS_IN_EPOCH,
    ] = ()
    """multistep: epochs after which the learning rate decays."""
    decay: Annotated[
        float,
        FRACTION,
        Needs("schedule.name", ("step", "multistep", "plateau")),
    ] = 0.1
    """step, multistep, plateau: factor of one decay."""
    power: Annotated[float, NOT_NEGATIVE, Needs("schedule.name", ("poly",))] = 1.0
    """poly: exponent; 1 is a straight line to schedule.min-lr."""
    patience_epochs: Annotated[int, NOT_NEGATIVE, Needs("schedule.name", ("plateau",))] = 10
    """plateau: decay after more than this many epochs without a better value of best-metric."""


@dataclass(frozen=True)
class Loss:
    name: Annotated[str, LOSS_NAME] = "cross_entropy"
    """cross_entropy; bce (binary_cross_entropy): a yes or no for each class, so an image may have several labels; or
    your own FILE.py:FUNCTION."""
    label_smoothing: Annotated[float, FRACTION] = 0.0
    """Fraction of the target that is spread over all classes, in training only."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight samples inversely to the size of their class; the mean weight is 1."""
    bce_target_threshold: Annotated[float | None, PART] = None
    """bce: a smoothed or mixed target above this is 1, any other 0 (as in ResNet strikes back: 0.2)."""
    bce_pos_weight: Annotated[tuple[float, ...], ALL_POSITIVE] = ()
    """bce: factor of the loss where the target is 1, as torch's pos_weight: one number, or one of each class."""
    # balanced: the mean is over the training samples. With label smoothing, the weight multiplies the whole loss of a
    # sample. torch's CrossEntropyLoss(weight, label_smoothing) differs: it weights each class's part of the smoothed
    # target by the weight of that class, and divides by the sum of the weights.


@dataclass(frozen=True)
class Ema:
    enabled: bool = False
    """Keep an exponential moving average (EMA) of the weights, evaluated and saved too."""
    decay: Annotated[float, FRACTION, NEEDS_EMA] = 0.9998
    """Fraction of the old average that each update keeps."""
    every_updates: Annotated[int, POSITIVE, NEEDS_EMA] = 1
    """Update the EMA only at every N-th update of an epoch, the first one among them."""
    scale_decay: Annotated[bool, NEEDS_EMA] = False
    """Multiply 1 - ema.decay by batch-size * ema.every-updates / epochs (at most 1), as torchvision does."""
    after_epochs: Annotated[float, NOT_NEGATIVE, NEEDS_EMA, STARTS_IN_EPOCH] = 0.0
    """The EMA equals the weights until so many epochs are done: with torchvision, its warm-up."""


@dataclass(frozen=True)
class Stop:
    patience_epochs: Annotated[
        int | None,
        POSITIVE,
        ENDS_RUN,
    ] = None
    """End the run after this many epochs without a better value of best-metric (early stopping); default: never."""
    updates: Annotated[
        int | None,
        POSITIVE,
        Free("a run may end earlier or later", unless=ENDING),
        ENDS_RUN,
    ] = None
    """End the run after this many updates, if epochs are not done earlier. What falls to the end of a run, falls until
    there: cosine, poly, one_cycle, and your own schedule."""
    hours: Annotated[float | None, POSITIVE, ENDS_RUN] = None
    """End the run after the epoch in which its total time over all starts reaches this many hours; default: never."""


@dataclass(frozen=True)
class Checkpoint:
    every_epochs: Annotated[int, POSITIVE] = 1
    """Save after every N epochs, and after the last epoch."""
    every_updates: Annotated[int | None, POSITIVE] = None
    """Save after every N updates too."""
    every_seconds: Annotated[float, NOT_NEGATIVE] = 600.0
    """Save after every N seconds too; 0: never by time."""
    keep: Annotated[int, POSITIVE] = 2
    """Number of newest checkpoints to keep, besides the best one by best-metric."""
    milestone_epochs: Annotated[int | None, POSITIVE] = None
    """Never delete the checkpoint of every N-th epoch."""
