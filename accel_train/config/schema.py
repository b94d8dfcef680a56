"""What a run is made of: one frozen `Config`, whose fields are the keys of a recipe and of the command line.

The recipe says what is learned. Where it is learned (the number of processes, the kind of device, the precision)
comes from the launcher and is not found here.

The string under a field is its help text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Data:
    name: str = "digits"
    """digits, mnist, fashion_mnist, cifar10, cifar100, folder, cache, synthetic, tar, hfds/NAME, wds, tfds/NAME."""
    root: Path = Path("data")
    """Folder of the data: where torchvision's sets lie or are downloaded to, or the image tree or cache itself."""
    val_fraction: float = 0.0
    """Share of the training samples set aside for validation, if the data has no such split of its own."""
    test_fraction: float = 0.0
    """Share of the samples set aside for the test, if the data has no such split of its own."""
    train_limit: int | None = None
    """Use only this many training samples."""
    test_limit: int | None = None
    """Use only this many samples of the validation and of the test split."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a whole batch, rather than make a smaller update of them."""
    skip_unreadable: Path | None = None
    """Leave out the images that this list (written by `accel-train check-data`) names."""
    placement: Literal["auto", "device", "host", "disk"] = "auto"
    """Where pixels lie: in the device's or the host's memory, or where they are stored; auto: as fast as they fit."""
    decode_on: Literal["host", "device"] = "host"
    """Where JPEG files are decoded: by worker processes, or by a CUDA device, a batch at once."""
    reduced_decode: bool = True
    """In training, decode a JPEG of twice the needed size or more to a smaller one: 1.4 to 2 times as fast, 48 dB
    (median PSNR) from Pillow's resize of the whole image; false: 61 dB."""
    max_pixels: int = 178_956_970
    """Refuse image files of more pixels: a small file may be made to fill the memory when it is decoded."""
    workers: int | None = None
    """Worker processes that load images, for each process; default: none for data in memory, else all cores."""
    image_size: int = 32
    """synthetic: height and width of an image, in pixels."""
    channels: int = 3
    """synthetic: 1 or 3. Image files: 1 reads them as grey."""
    classes: int = 10
    """synthetic: number of classes."""
    train_images: int = 2048
    """synthetic: number of training images."""
    test_images: int = 512
    """synthetic: number of test images."""


@dataclass(frozen=True)
class Augment:
    resize: int | None = None
    """Bring the short side to this many pixels before cropping, in training (not for crop=resized) and evaluation."""
    crop: Literal["center", "random", "resized"] = "center"
    """Training crop: the middle, a random place, or torchvision's RandomResizedCrop."""
    pad: int = 0
    """Pixels added to each side before a random crop; see pad_mode."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    """The added pixels are black (constant), or the image mirrored at its edge (reflect)."""
    scale: tuple[float, float] = (0.08, 1.0)
    """crop=resized: smallest and largest share of the image's area."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """crop=resized: smallest and largest width / height."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """A policy of torchvision's that changes colours and geometry of each image."""
    randaugment_ops: int = 2
    """randaugment: number of operations on each image."""
    randaugment_magnitude: int = 9
    """randaugment: strength of each operation, 0 to 30."""
    erase: float = 0.0
    """Probability that a random rectangle is erased (random erasing)."""
    mixup: float = 0.0
    """Mixup: alpha of its Beta distribution; 0: off."""
    cutmix: float = 0.0
    """CutMix: alpha of its Beta distribution; 0: off. With both, each pair of samples takes one at random."""
    mix_probability: float = 1.0
    """Probability that a pair of samples is mixed at all."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel that is subtracted, in 0..1; default: the pretrained model's, else the data's."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel to divide by, in 0..1; default: the pretrained model's, else the data's."""


@dataclass(frozen=True)
class Model:
    name: str = "mnist_cnn"
    """A name of timm's, torchvision/NAME, or ours: digits_cnn, mnist_cnn, alexnet_bn, resnet9, resnet18_cifar, …"""
    pretrained: bool = False
    """Start from published weights (the last layer is made new if the number of classes differs)."""
    image_size: int | None = None
    """Height and width of the model's input, in pixels; default: the pretrained model's, else the data's, else 224."""
    freeze_body: bool = False
    """Train the classifier's last layer only; the statistics of the body's BatchNorms stay as they are."""
    dropout: float | None = None
    """Dropout before the classifier, where the model has one; default: the model's own."""
    drop_path: float | None = None
    """Stochastic depth, where the model has it; default: the model's own."""
    gradient_checkpointing: bool = False
    """Compute activations anew in the backward pass: less memory, more time."""
    sync_batchnorm: bool = False
    """BatchNorm over the micro-batches of all processes (on GPUs)."""


@dataclass(frozen=True)
class Optim:
    name: str = "sgd"
    """Any of timm's optimizers: sgd (Nesterov), momentum (plain), adam, adamw, lamb, lion, muon (hidden layers), …"""
    lr: float = 0.1
    """Learning rate of the whole batch; it does not depend on the number of processes."""
    weight_decay: float = 0.0
    """Weight decay; norms and biases are left out unless decay_all is set."""
    decay_all: bool = False
    """Decay norms and biases too, as plain torch.optim does."""
    momentum: float = 0.9
    """Momentum, of those optimizers that have one."""
    betas: tuple[float, float] | None = None
    """Betas of Adam's relatives; default: the optimizer's own."""
    eps: float | None = None
    """Epsilon; default: the optimizer's own."""
    layer_decay: float | None = None
    """Each layer's learning rate is this factor times that of the layer after it (0..1)."""
    clip: float | None = None
    """Clip gradients to this value; see clip_mode."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """By the norm of all gradients, by value, or adaptively by the norm of each weight (AGC)."""


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "cosine", "step", "multistep", "poly", "plateau"] = "constant"
    """The learning rate after the warm-up; all but plateau are functions of the update's number."""
    warmup_epochs: float = 0.0
    """The learning rate rises from warmup_lr during these epochs."""
    warmup_lr: float = 0.0
    """Learning rate at the start of the warm-up."""
    min_lr: float = 0.0
    """cosine, poly, plateau: the lowest learning rate."""
    step_epochs: float = 30.0
    """step: epochs from one decay to the next, counted from the start of the run."""
    milestones: tuple[int, ...] = ()
    """multistep: the epochs after which the learning rate decays."""
    decay: float = 0.1
    """step, multistep, plateau: the factor of one decay."""
    power: float = 1.0
    """poly: exponent; 1 is a straight line to min_lr."""
    patience_epochs: int = 10
    """plateau: the learning rate decays once more than this many epochs bring no better validation accuracy."""


@dataclass(frozen=True)
class Loss:
    name: Literal["cross_entropy", "binary_cross_entropy"] = "cross_entropy"
    """cross_entropy over the classes, or binary_cross_entropy: each class against all others, their mean."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes, in training only."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each sample weighs inversely to the size of its class; the mean weight of the training samples is 1.
    With label smoothing the whole loss of a sample has its weight; torch's CrossEntropyLoss(weight, label_smoothing)
    gives each class's share of the smoothing the weight of that class, and divides by the sum of the weights."""


@dataclass(frozen=True)
class Ema:
    enabled: bool = False
    """Keep a running mean of the weights; it is evaluated and saved beside the weights themselves."""
    decay: float = 0.9998
    """Share of the old mean that is kept at each update."""
    warmup: bool = False
    """Let the decay grow from 0 towards its value during the first updates."""


@dataclass(frozen=True)
class Checkpoint:
    every_epochs: int = 1
    """Save at the end of every so many epochs; the last epoch is always saved."""
    every_updates: int | None = None
    """Save every so many updates, too."""
    every_seconds: float = 600.0
    """Save every so many seconds, too; 0: never by time."""
    keep: int = 2
    """Number of newest checkpoints to keep; the best by validation accuracy is kept besides."""
    milestone_epochs: int | None = None
    """Keep the checkpoint of every so many epochs for good."""


@dataclass(frozen=True)
class Config:
    recipe: str = ""
    """Name of the recipe (set by the program)."""
    output_dir: Path | None = None
    """Folder of the run; default: runs/RECIPE/DATE-TIME. A folder with an unfinished run goes on with it."""
    seed: int = 0
    """All that is random follows from it: weights, order, augmentation, dropout, splits."""
    epochs: int = 1
    """Passes over the training data."""
    batch_size: int = 64
    """Samples of one optimizer update, over all processes."""
    micro_batch_size: int | None = None
    """The most samples that one process takes in one forward pass; gradient accumulation follows from it."""
    eval_batch_size: int | None = None
    """Samples of one process in one forward pass of the evaluation; default: as in training, at least 256."""
    eval_every_epochs: int = 1
    """Evaluate after every so many epochs; the last epoch is always evaluated."""
    log_every_updates: int = 50
    """Write a line to metrics.jsonl (and to a console that is no terminal) every so many updates."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of the run's folder, if there is one; must; never; or a path."""
    allow_change: tuple[str, ...] = ()
    """Keys of the configuration (optim.lr, or a group: optim) that may differ from the checkpoint's at resume."""
    take_over: bool = False
    """Take the run from the start that owns it, alive or not; that one ends. For this start only."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """A loss or gradient that is not finite: stop; skip this update; or rewind and leave it out."""
    rendezvous_timeout_seconds: float = 600.0
    """How long the processes wait for one another at the start, before the missing ones are named."""
    start_timeout_seconds: float = 3600.0
    """As hang_timeout_seconds, until this start's first update is done: downloads, compilation; 0: never."""
    hang_timeout_seconds: float = 1800.0
    """End the run, all stacks written down, after so long without progress; 0: never."""
    share_gpus: bool = False
    """Let several processes of a node use one GPU: to try things out, for it is slow (gloo instead of NCCL)."""
    trackers: tuple[str, ...] = ()
    """Trackers of Accelerate's to log to: tensorboard, wandb, mlflow, …"""
    config_only: bool = False
    """Print the resolved configuration and what follows from it, then stop."""
    traceback: bool = False
    """Show the traceback of an error, too."""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    ema: Ema = field(default_factory=Ema)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


POSITIVE = (
    "epochs", "batch-size", "micro-batch-size", "eval-batch-size", "eval-every-epochs", "log-every-updates",
    "data.train-limit", "data.test-limit", "data.image-size", "data.train-images", "data.test-images",
    "augment.resize", "augment.randaugment-ops", "model.image-size", "schedule.step-epochs", "checkpoint.every-epochs",
    "checkpoint.every-updates", "checkpoint.keep", "checkpoint.milestone-epochs", "optim.clip", "optim.eps",
    "rendezvous-timeout-seconds", "data.max-pixels",
)  # fmt: skip
NOT_NEGATIVE = (
    "seed", "data.workers", "augment.pad", "augment.mixup", "augment.cutmix", "optim.lr", "optim.weight-decay",
    "schedule.warmup-epochs", "schedule.warmup-lr", "schedule.min-lr", "schedule.patience-epochs",
    "checkpoint.every-seconds", "schedule.power", "start-timeout-seconds", "hang-timeout-seconds",
)  # fmt: skip
SHARES = (  # probabilities and fractions: 0 <= x <= 1
    "augment.flip", "augment.erase", "augment.mix-probability", "optim.momentum", "optim.layer-decay",
    "loss.label-smoothing", "ema.decay", "model.dropout", "model.drop-path", "schedule.decay",
)  # fmt: skip


def value(config: Config, key: str) -> Any:
    """The value of an option such as "optim.lr"."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part.replace("-", "_"))
    return found


def check(config: Config) -> tuple[str, str] | None:
    """The first (key, expectation) that a value of `config` does not meet, or None.

    Only what needs no knowledge of data, model or world is looked at here.
    """
    bounds: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
        (POSITIVE, "a number greater than 0", lambda x: x > 0),
        (NOT_NEGATIVE, "a number that is not negative", lambda x: x >= 0),
        (SHARES, "a number from 0 to 1", lambda x: 0 <= x <= 1),
        (("data.val-fraction", "data.test-fraction"), "a number from 0 up to, but not, 1", lambda x: 0 <= x < 1),
        (("augment.randaugment-magnitude",), "a number from 0 to 30", lambda x: 0 <= x <= 30),
        (("data.channels",), "1 or 3", lambda x: x in (1, 3)),
        (("data.classes",), "at least 2", lambda x: x >= 2),
        (("augment.scale", "augment.ratio"), "two numbers, 0 < smallest <= largest", lambda x: 0 < x[0] <= x[1]),
        (("augment.std",), "numbers greater than 0", lambda x: all(s > 0 for s in x)),
        (("schedule.milestones",), "epochs that rise", lambda x: list(x) == sorted(set(x)) and min(x, default=1) > 0),
    )
    for keys, expected, holds in bounds:
        for key in keys:
            found = value(config, key)
            if found is not None and not holds(found):
                return key, expected
    if config.data.val_fraction + config.data.test_fraction >= 1:
        return "data.val-fraction", "val-fraction and test-fraction that leave something to train on"
    if config.schedule.name == "multistep" and not config.schedule.milestones:
        return "schedule.milestones", "at least one epoch for schedule.name=multistep"
    if config.schedule.warmup_epochs > config.epochs:
        return "schedule.warmup-epochs", f"at most the {config.epochs} epochs of the run"
    return None


def as_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested plain values, as a recipe file has them."""

    def plain(found: Any) -> Any:
        if isinstance(found, dict):
            return {key: plain(item) for key, item in found.items()}
        if isinstance(found, (list, tuple)):
            return [plain(item) for item in found]
        return str(found) if isinstance(found, Path) else found

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


def to_yaml(config: Config) -> str:
    """The configuration as the text of a recipe file, which starts the same run again."""
    import yaml

    settings = as_dict(config)
    for key in ("recipe", "take_over", "config_only", "traceback"):  # of this start, not of the run
        settings.pop(key)
    if config.recipe:  # the file is called config.yaml, and would be the recipe "config"
        settings = {"about": {"recipe": config.recipe}, **settings}
    return yaml.safe_dump(settings, sort_keys=False)
