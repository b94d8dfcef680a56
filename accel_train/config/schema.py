"""The options of a run: one frozen `Config`, whose fields are the keys of a recipe and of the command line.

The recipe says what to learn. Where to learn it (the number of processes, the kind of device, the precision) is set by
the launcher and is not part of `Config`.

All that there is to say about an option is said here, once: its type, bounds (POSITIVE, …), whether it may change when
a run goes on (Free, …), its default, and its help text in the string under it. Values that do not fit each other are in
checks.py.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from accel_train.config.declaration import (
    ABOVE_0,
    AFTER_FAILURE,
    ALL_POSITIVE,
    CHANNELS,
    COUNT,
    DECIDES_SAMPLES,
    ENDING,
    ENDS_RUN,
    FALLING,
    FRACTION,
    INTERVAL,
    JSON_OBJECT,
    LOSS_NAME,
    MILESTONES,
    MODEL_NAME,
    NEEDS_BOX,
    NEEDS_EMA,
    NEEDS_MIXING,
    NEEDS_SHARDS,
    NEEDS_WARMUP,
    NOT_NEGATIVE,
    ONE_START,
    OWN,
    PART,
    POLICIES,
    POLICY,
    POSITIVE,
    SCHEDULE_NAME,
    WITHOUT_MOMENTUM,
    Bound,
    Free,
    Interpolation,
    Needs,
    Word,
)
from accel_train.config.url import is_url


@dataclass(frozen=True)
class Origin:
    """Facts about the initial weights, saved in the run so that it can resume without these weights.

    Every field is empty for runs without --model.weights.
    """

    weights: str = ""
    """The model.weights that was read, as the user wrote it."""
    sha256: str = ""
    """Of the file of weights."""
    image_size: int | None = None
    """Height and width of the images that the weights were trained with."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel (0 to 1) when the weights were trained."""
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Data:
    name: Annotated[str, DECIDES_SAMPLES] = "digits"
    """digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, csv (data.root is the table), synthetic,
    wds, torch/NAME, hfds/NAME, or your own FILE.py:FUNCTION."""
    root: Annotated[Path, Free("the next machine may keep the same data in another folder")] = Path("data")
    """Folder of the dataset, a table, or the folder torchvision downloads to; wds, hfds/parquet: also the URL of
    a folder or of files: s3://bucket/train, https://host/train-{0000..0127}.tar, hf://datasets/user/name."""
    val_fraction: Annotated[float, PART, DECIDES_SAMPLES] = 0.0
    """Fraction of the training samples for validation, if the dataset has no such split."""
    test_fraction: Annotated[float, PART, DECIDES_SAMPLES] = 0.0
    """Fraction of the samples for the test, if the dataset has no such split."""
    only_classes: Annotated[tuple[str, ...], DECIDES_SAMPLES] = ()
    """Use only the images of these classes, by name; their order is that of the model's outputs. Default: all."""
    train_limit: Annotated[int | None, POSITIVE, DECIDES_SAMPLES] = None
    """Use only this many training samples."""
    test_limit: Annotated[int | None, POSITIVE] = None
    """Use only this many samples of the validation split, and of the test split."""
    sampler: Annotated[Literal["shuffle", "balanced"], DECIDES_SAMPLES] = "shuffle"
    """shuffle: each training sample once an epoch; balanced: draw each class equally often, in an epoch of the same
    length."""
    order: Annotated[Literal["full", "shards"], DECIDES_SAMPLES] = "full"
    """full: random over the whole set; shards (for wds): open a few shards at a time and shuffle among
    these, for data on a network file system or in an object store (docs/large_data.md)."""
    open_shards: Annotated[int, POSITIVE, NEEDS_SHARDS, DECIDES_SAMPLES] = 128
    """data.order=shards: how many shards are mixed at a time."""
    repeats: Annotated[int, COUNT, DECIDES_SAMPLES] = 1
    """Repeated augmentation: each sample is N times in its batch, each time augmented differently. The epoch is as long
    as before, so it uses 1/N of the samples."""
    drop_last: bool = False
    """Skip an epoch's last samples if they do not fill a batch (else: a smaller batch)."""
    skip_unreadable: Annotated[
        Path | None, Free("it leaves out images that end a run otherwise; all others keep their index")
    ] = None
    """Skip the images in this list, which `accel-train check-data` writes."""
    stage: Annotated[Path | None, Free("where the files are copied to, not what is in them")] = None
    """wds, hfds/parquet: copy the files of data.root, a URL or a slow path, to this folder on a disk of the node
    before the training, and keep them; default for a URL: the job's local directory, else ~/.cache/accel_train."""
    image_column: Annotated[str | None, DECIDES_SAMPLES] = None
    """The column of the images; default: path (csv) or image (hfds)."""
    label_column: Annotated[str | None, DECIDES_SAMPLES] = None
    """The column of the labels; default: label."""
    workers: Annotated[int | None, NOT_NEGATIVE, Free("how an update is computed, not its result")] = None
    """Image-loading workers of each process; default: 0 for data in memory, else all cores."""
    channels: Annotated[int, CHANNELS] = 3
    """Image files: 1 converts them to greyscale. synthetic: 1 or 3."""

    @property
    def is_staged(self) -> bool:
        """Whether this node keeps a copy of the files: data.root is a URL, or data.stage is given."""
        return is_url(self.root) or self.stage is not None


@dataclass(frozen=True)
class Augment:
    resize: Annotated[int | None, POSITIVE] = None
    """Resize the short side to this many pixels before cropping, in evaluation, and in training if augment.crop is
    center or random."""
    crop_fraction: Annotated[float | None, ABOVE_0] = None
    """In evaluation the crop has this fraction of the image's short side, at any size, as with timm's crop_pct; in
    place of augment.resize. It does not change the training."""
    crop: Literal["center", "random", "resized", "squash"] = "center"
    """Training crop: the centre; a random position; torchvision's RandomResizedCrop (resized); or the whole image
    as a square (squash)."""
    pad: Annotated[int, NOT_NEGATIVE, Needs("augment.crop", ("random",))] = 0
    """Pixels to add on each side before a random crop; see augment.pad-mode."""
    pad_mode: Annotated[Literal["constant", "reflect"], Needs("augment.pad")] = "constant"
    """Padding: black (constant), or the image mirrored at its edge (reflect)."""
    scale: Annotated[tuple[float, float], INTERVAL, NEEDS_BOX] = (0.08, 1.0)
    """crop=resized: smallest and largest fraction of the image's area."""
    ratio: Annotated[tuple[float, float], INTERVAL, NEEDS_BOX] = (0.75, 4 / 3)
    """crop=resized: smallest and largest width / height."""
    interpolation: Interpolation = "bilinear"
    """How images are resized, in training and evaluation, with antialiasing; and how augment.policy
    turns them."""
    train_interpolation: Literal[Interpolation, "random"] | None = None
    """The interpolation in training, if it differs; random: bilinear or bicubic, drawn for each image. Default:
    augment.interpolation."""
    flip: Annotated[float, FRACTION] = 0.0
    """Probability of a horizontal flip."""
    vertical_flip: Annotated[float, FRACTION] = 0.0
    """Probability of a vertical flip."""
    policy: Annotated[str, POLICY] = "none"
    """What changes the colours and geometry of each image. torchvision's randaugment, trivialaugment, augmix,
    autoaugment (the one for ImageNet), autoaugment_cifar10 and autoaugment_svhn; or timm's, as timm writes them:
    rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original-mstd0.5, v0, 3a, …"""
    own: Annotated[str, OWN] = "none"
    """Your own transform of each image after its crop, FILE.py:NAME, such as a rotation or a blur of torchvision, of
    albumentations, or a function (docs/augmentation.md)."""
    randaugment_ops: Annotated[int, POSITIVE, Needs("augment.policy", ("randaugment",))] = 2
    """randaugment: number of operations on each image."""
    randaugment_magnitude: Annotated[
        int, Bound("a number from 0 to 30", lambda x: 0 <= x <= 30), Needs("augment.policy", ("randaugment",))
    ] = 9
    """randaugment: strength of each operation, 0 to 30, as in torchvision: 9 turns by 9 degrees. timm's rand-m9 turns
    by 27, and leaves out half of the operations."""
    erase: Annotated[float, FRACTION] = 0.0
    """Probability of erasing a random rectangle (random erasing)."""
    erase_mode: Annotated[Literal["const", "rand", "pixel"], Needs("augment.erase")] = "const"
    """Fill erased rectangles with the mean colour (const), a random colour (rand), or a random colour of each pixel."""
    mixup: Annotated[float, NOT_NEGATIVE] = 0.0
    """Mixup: alpha of the Beta distribution; 0: off."""
    cutmix: Annotated[float, NOT_NEGATIVE] = 0.0
    """CutMix: alpha of the Beta distribution; 0: off. With Mixup on too, one of them is drawn, each as often as the
    other: augment.mix-mode."""
    mix_probability: Annotated[float, FRACTION, NEEDS_MIXING] = 1.0
    """Probability of mixing (Mixup or CutMix), of each pair: see augment.mix-mode."""
    mix_mode: Annotated[Literal["pair", "elem", "batch"], NEEDS_MIXING] = "pair"
    """pair: the two images of a pair share one mixing ratio (lambda); elem: each image has its own; batch: all pairs of
    a virtual batch share one (see virtual-batch-size)."""
    mean: tuple[float, ...] | None = None
    """Mean to subtract from each channel (0 to 1); default: that of the weights, else the data's."""
    std: Annotated[tuple[float, ...] | None, ALL_POSITIVE] = None
    """Standard deviation to divide each channel by (0 to 1); default: as for augment.mean."""

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix > 0

    @property
    def mixes(self) -> bool:
        """Whether neighbouring samples are mixed in pairs."""
        return self.mixup > 0 or self.cuts

    @property
    def timm_policy(self) -> bool:
        """Whether augment.policy is written as timm writes it."""
        return self.policy not in POLICIES

    @property
    def draws_globally(self) -> bool:
        """Whether something draws from a global generator, which must be seeded for each image."""
        return self.policy != "none" or self.own != "none" or self.crop == "random"

    @property
    def each_image(self) -> bool:
        """Whether images of one size, too, are augmented one at a time, by data workers."""
        transforms = self.policy != "none" or self.own != "none"
        return transforms or self.crop not in ("center", "random") or self.train_interpolation == "random"

    def in_evaluation(self, size: int) -> Augment:
        """The same for an evaluation with an input of `size` pixels: `crop_fraction` has become the `resize` that it is
        there, rounded down as in timm's transforms_imagenet_eval."""
        if self.crop_fraction is None:
            return self
        return replace(self, resize=math.floor(size / self.crop_fraction), crop_fraction=None)

    def interpolation_of(self, *, training: bool) -> str:
        """How images are resized: an Interpolation, or random."""
        return self.train_interpolation or self.interpolation if training else self.interpolation


@dataclass(frozen=True)
class Model:
    name: Annotated[str, MODEL_NAME] = "mnist_cnn"
    """A timm model, torchvision/NAME, your own FILE.py:FUNCTION, or ours: digits_cnn, mnist_cnn, alexnet_bn, …
    Published weights other than the default are named after a dot: resnet50.a1_in1k, torchvision/NAME.IMAGENET1K_V1."""
    kwargs: Annotated[str | None, JSON_OBJECT] = None
    """More arguments of the model, as JSON: '{"depth": 3}'. In a recipe also as a mapping."""
    pretrained: bool = False
    """Start from published weights. The last layer is new if the number of classes differs."""
    weights: Path | None = None
    """Start from the weights in this file (.safetensors, .pth), run or checkpoint."""
    image_size: Annotated[int | None, POSITIVE] = None
    """Input height and width in pixels; default: that of the weights, the data's, or 224."""
    eval_image_size: Annotated[int | None, POSITIVE] = None
    """Input height and width in evaluation and prediction, if they differ; see augment.resize. Default: as in
    training."""
    freeze_body: bool = False
    """Train only the last layer; BatchNorm statistics of the other layers do not change."""
    freeze: tuple[str, ...] = ()
    """Layers not to train, by their names, such as conv1 layer1."""
    freeze_epochs: Annotated[int | None, POSITIVE] = None
    """Train what is frozen, too, after this many epochs; default: never."""
    dropout: Annotated[float | None, FRACTION] = None
    """Dropout rate before the classifier, if the model has dropout; default: the model's."""
    drop_path: Annotated[float | None, FRACTION] = None
    """Stochastic depth rate, if the model has it; default: the model's."""
    gradient_checkpointing: Annotated[bool, Free("how gradients are computed, not their values")] = False
    """Recompute activations in the backward pass: less memory, more time."""


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
    """Learning rate of the last layer, if it differs; the schedule changes both in the same proportion."""
    clip: Annotated[float | None, POSITIVE] = None
    """Clip the gradients: the largest norm of all of them together."""


@dataclass(frozen=True)
class Schedule:
    name: Annotated[str, SCHEDULE_NAME] = "constant"
    """Learning rate after the warm-up: constant, cosine, step, multistep, poly (a straight line), plateau; or your own
    FILE.py:FUNCTION of (epoch, epochs), which returns the factor of the learning rate. All but plateau depend on the
    update number alone."""
    per: Literal["update", "epoch"] = "update"
    """Change the learning rate at each update, or only where an epoch begins, as timm and torchvision do by default."""
    warmup_epochs: Annotated[float, NOT_NEGATIVE] = 0.0
    """Epochs in which the learning rate rises from schedule.warmup-lr to optim.lr."""
    warmup_lr: Annotated[float, NOT_NEGATIVE, NEEDS_WARMUP] = 0.0
    """Learning rate at the start of the warm-up."""
    warmup_prefix: Annotated[bool, NEEDS_WARMUP, Needs("schedule.name", ("cosine", "poly"))] = True
    """cosine, poly: true: the decay begins when the warm-up ends; false: it is computed from the first update (timm's
    default)."""
    min_lr: Annotated[float, NOT_NEGATIVE, Needs("schedule.name", (*FALLING, "plateau"))] = 0.0
    """cosine, poly, plateau: lowest learning rate."""
    step_epochs: Annotated[float, POSITIVE, Needs("schedule.name", ("step",))] = 30.0
    """step: epochs from one decay to the next, counted from the start of the run."""
    milestones: Annotated[tuple[int, ...], MILESTONES, Needs("schedule.name", ("multistep",))] = ()
    """multistep: epochs after which the learning rate decays."""
    decay: Annotated[float, FRACTION, Needs("schedule.name", ("step", "multistep", "plateau"))] = 0.1
    """step, multistep, plateau: factor of one decay."""
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
    """Update the EMA at the updates 1, N + 1, 2 N + 1, … of each epoch."""
    scale_decay: Annotated[bool, NEEDS_EMA] = False
    """Multiply 1 - ema.decay by batch-size * ema.every-updates / epochs (at most 1), as torchvision does."""
    after_epochs: Annotated[float, NOT_NEGATIVE, NEEDS_EMA] = 0.0
    """The EMA equals the weights until so many epochs are done: with torchvision, its warm-up."""


@dataclass(frozen=True)
class Stop:
    patience_epochs: Annotated[int | None, POSITIVE, ENDS_RUN] = None
    """End the run after this many epochs without a better value of best-metric (early stopping); default: never."""
    updates: Annotated[int | None, POSITIVE, Free("a run may end earlier or later", unless=ENDING), ENDS_RUN] = None
    """End the run after this many updates, if epochs are not done earlier. A schedule that decays until the end of the
    run (cosine, poly, your own) then decays until this update."""
    hours: Annotated[float | None, POSITIVE, ENDS_RUN] = None
    """End the run after the epoch in which its total time, over all its starts, reaches this many hours; default:
    never."""


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


@dataclass(frozen=True)
class Config:
    recipe: Annotated[str, ONE_START] = ""
    """Name of the recipe (set by the program)."""
    origin: Origin = field(default_factory=Origin)
    """What the weights were trained with (set by the program)."""
    output_dir: Annotated[Path | None, ONE_START] = None
    """Folder of the run; default: runs/RECIPE/DATE-TIME. If it contains an unfinished run, that run is resumed."""
    seed: Annotated[int, NOT_NEGATIVE, DECIDES_SAMPLES] = 0
    """Seed of everything random: weights, order, augmentation, dropout and splits."""
    epochs: Annotated[int | float, POSITIVE, Free("a run may become longer", unless=ENDING), ENDS_RUN] = 1
    """Passes over the training data; 2.5 ends in the middle of the third."""
    batch_size: Annotated[int, POSITIVE, Bound("a number of at most 2,000,000,000", lambda x: x <= 2_000_000_000)] = 64
    """Samples per optimizer update, over all processes."""
    micro_batch_size: Annotated[int | None, POSITIVE, Free("how an update is computed, not its result")] = None
    """Largest number of samples in one forward pass of one process. Gradient accumulation follows from it."""
    virtual_batch_size: Annotated[int | None, POSITIVE] = None
    """Samples that BatchNorm normalises together (a ghost batch), on any number of processes; default: 16 to 32, which
    follows from the batch size."""
    bitwise: bool = False
    """Compute the same weights on any number of processes to the last bit: slower."""
    eval_batch_size: Annotated[int | None, POSITIVE, Free("only what is measured")] = None
    """Samples in one forward pass of one process in evaluation; default: 256, or as in training if that is more; for a
    split with fewer samples the next power of two."""
    eval_every_epochs: Annotated[int, POSITIVE, Free("only what is measured", unless=("plateau",))] = 1
    """Evaluate after every N epochs, and after the last epoch."""
    eval_every_updates: Annotated[int | None, POSITIVE, Free("only what is measured")] = None
    """Evaluate after every N updates too."""
    best_metric: str | None = None
    """Validation metric for the best checkpoint, early stopping and plateau: accuracy, loss, f1, map (of images with
    several labels), or the name of one of --metrics; default: accuracy or map."""
    metrics: Annotated[tuple[str, ...], Free("only what is measured")] = ()
    """More metrics of each evaluation, your own: FILE.py:NAME (docs/own.md)."""
    log_every_updates: Annotated[int, POSITIVE, Free("only what is shown")] = 50
    """Write a line to metrics.jsonl (and to the log, if not on a terminal) every N updates."""
    resume: Annotated[str, ONE_START] = "auto"
    """auto: continue from the newest checkpoint of the run, if any; must: fail without one; or a path."""
    allow_change: Annotated[tuple[str, ...], ONE_START] = ()
    """Options (optim.lr, or a group: optim) that may differ from the resumed checkpoint's."""
    take_over: Annotated[bool, ONE_START] = False
    """Take the run over from the process that owns it, alive or not; that process ends. It applies to this start
    of the program only."""
    on_nonfinite: Annotated[Literal["stop", "skip"], AFTER_FAILURE] = "stop"
    """What to do about a NaN or infinite loss or gradient: stop the run, or skip the update."""
    rendezvous_timeout_seconds: Annotated[float, POSITIVE, AFTER_FAILURE] = 600.0
    """How long processes wait for each other at the start; then the missing ones are named."""
    hang_timeout_seconds: Annotated[float, NOT_NEGATIVE, AFTER_FAILURE] = 1800.0
    """Without progress for this time, write the stacks of all threads and end the run; 0: never. Before the first
    update of a start the limit is at least an hour."""
    share_gpus: Annotated[bool, Free("where the run is computed")] = False
    """Let several processes of a node share one GPU: slow (gloo instead of NCCL), for tests."""
    trackers: Annotated[tuple[str, ...], Free("only what is shown")] = ()
    """Where to send the curves: tensorboard, wandb or mlflow (docs/evaluate.md)."""
    config_only: Annotated[bool, ONE_START] = False
    """Print all settings of the training as a recipe, then stop."""
    traceback: Annotated[bool, ONE_START] = False
    """Show the traceback of an error too."""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    ema: Ema = field(default_factory=Ema)
    stop: Annotated[Stop, Free("a run may end earlier or later")] = field(default_factory=Stop)
    checkpoint: Annotated[Checkpoint, Free("only what is kept")] = field(default_factory=Checkpoint)


def as_dict(config: Any) -> dict[str, Any]:
    """Return the configuration as nested plain values, as a recipe file contains them."""

    def plain(item: Any) -> Any:
        return list(item) if isinstance(item, tuple) else str(item) if isinstance(item, Path) else item

    return dataclasses.asdict(config, dict_factory=lambda fields: {name: plain(item) for name, item in fields})


def to_yaml(config: Config) -> str:
    """Return the configuration as the text of a recipe file, which starts the same run again."""
    import yaml

    settings = as_dict(config)
    for key in ("recipe", "origin", "take_over", "config_only", "traceback"):  # of this start, not of the run
        settings.pop(key)
    if config.recipe:  # the file is named config.yaml, and would otherwise be the recipe "config"
        settings = {"about": {"recipe": config.recipe}, **settings}
    return yaml.safe_dump(settings, sort_keys=False)


# --- what the declarations say -------------------------------------------------------------------------

OptionTypes = Mapping[str, Any]  # key of each option -> type of its value

UNIONS = (typing.Union, types.UnionType)
SET_BY_PROGRAM = ("recipe", "origin")
"""The fields of `Config` that are not options."""


@cache
def option_types(cls: type[Any] = Config) -> OptionTypes:
    """Return the options that are the fields of `cls`: key ("optim.weight-decay") -> type of its value."""
    fields = _fields_of(cls)  # type: ignore[arg-type]
    return {
        key: kind
        for key, (kind, parts) in fields.items()
        if key.partition(".")[0] not in SET_BY_PROGRAM and not any(isinstance(part, Word) for part in parts)
    }


def positional_words(cls: type[Any]) -> dict[str, tuple[Any, Word]]:
    """Return the fields of a command that are words without a key: name -> (type of its value, what is declared)."""
    fields = _fields_of(cls)  # type: ignore[arg-type]
    return {
        key.replace("-", "_"): (kind, part)
        for key, (kind, parts) in fields.items()
        for part in parts
        if isinstance(part, Word)
    }


M = TypeVar("M")


def declared(marker: type[M], cls: Any = Config) -> list[tuple[str, M]]:
    """Return what the fields of `cls` declare of this type: (key, the object)."""
    return [(key, each) for key, (_, parts) in _fields_of(cls).items() for each in parts if isinstance(each, marker)]


@cache
def _fields_of(cls: type[Any]) -> dict[str, tuple[Any, tuple[object, ...]]]:
    """The key of each field of `cls` and of its groups -> (its type, what is declared of its group, and of it)."""
    result: dict[str, tuple[Any, tuple[object, ...]]] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for name in (each.name for each in dataclasses.fields(cls)):
        hint = hints[name]
        kind, *parts = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        key = name.replace("_", "-")
        if dataclasses.is_dataclass(kind) and name not in SET_BY_PROGRAM:
            inside = _fields_of(typing.cast(type[Any], kind))  # type: ignore[arg-type]
            result |= {f"{key}.{inner}": (of, (*parts, *own)) for inner, (of, own) in inside.items()}
        else:
            result[key] = kind, tuple(parts)
    return result


def value(config: Any, key: str) -> Any:
    """Return the value of an option such as "optim.lr"."""
    return operator.attrgetter(key.replace("-", "_"))(config)


def groups(known: OptionTypes) -> set[str]:
    """Return the names of the groups of options, such as "optim"."""
    return {key.partition(".")[0] for key in known if "." in key}


def takes_many_values(kind: Any) -> bool:
    """Whether an option of this type is followed by several words."""
    return any(typing.get_origin(part) is tuple for part in (kind, *typing.get_args(kind)))


def choices(kind: Any) -> tuple[str, ...]:
    """Return the words that an option of this type accepts; () if it accepts others too."""
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def in_words(kind: Any) -> str:
    """Return what a value of this type looks like, such as "a whole number or none"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(arguments)
    if origin is tuple:
        count = "any number of" if arguments[-1] is ... else str(len(arguments))
        return f"{count} {({int: 'whole numbers', float: 'numbers'}).get(arguments[0], 'words')}"
    if types.NoneType in arguments:
        return " or ".join(in_words(part) for part in arguments if part is not types.NoneType) + " or none"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        int | float: "a number",
        Path: "a path",
        str: "text",
    }
    return words[kind]
