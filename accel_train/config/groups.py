"""The groups of options, such as `optim`: the fields of each are keys of a recipe and of the command line.

The string under a field is its help text. `schema.Config` puts the groups together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Data:
    name: str = "digits"
    """digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, csv (data.root is the table), cache, synthetic,
    tar, wds, torch/NAME, hfds/NAME, hfids/NAME, tfds/NAME, or your own FILE.py:FUNCTION."""
    root: Path = Path("data")
    """Folder of the dataset, a cache file, or the folder torchvision downloads to."""
    val_fraction: float = 0.0
    """Fraction of the training samples for validation, if the dataset has no such split."""
    test_fraction: float = 0.0
    """Fraction of the samples for the test, if the dataset has no such split."""
    train_limit: int | None = None
    """Use only this many training samples."""
    test_limit: int | None = None
    """Use only this many samples of the validation split, and of the test split."""
    sampler: Literal["shuffle", "balanced", "weights"] = "shuffle"
    """shuffle: each training sample once an epoch; balanced: draw each class equally often, in an epoch of the same
    length; weights: draw samples by their weights in the data."""
    drop_last: bool = False
    """Skip an epoch's last samples if they do not fill a batch (else: a smaller batch)."""
    skip_unreadable: Path | None = None
    """Skip the images in this list, which `accel-train check-data` writes."""
    placement: Literal["auto", "device", "host", "disk"] = "auto"
    """Where images are kept: device memory, host memory or disk; auto: the fastest with enough room."""
    reduced_decode: bool = True
    """In training, decode JPEGs of at least twice the needed size at a reduced size, which is faster."""
    # 1.4 to 2 times as fast. Median PSNR against Pillow's resize of the full image: 48 dB; with false: 61 dB.
    max_pixels: int = 178_956_970
    """Refuse larger images: a small malicious file can fill the memory when decoded."""
    range: tuple[float, float] | None = None
    """The values of black and white in images of more than 8 bits, such as 0 1 or 0 4095; default: 0 65535 for 16 bits;
    floats and 32-bit integers have none, and are refused."""
    workers: int | None = None
    """Image-loading workers of each process; default: 0 for data in memory, else all cores."""
    image_size: int = 32
    """synthetic: height and width of an image, in pixels."""
    channels: int = 3
    """synthetic: 1 or 3. Image files: 1 converts them to greyscale."""
    classes: int = 10
    """synthetic: number of classes."""
    train_images: int = 2048
    """synthetic: number of training images."""
    test_images: int = 512
    """synthetic: number of test images."""


@dataclass(frozen=True)
class Augment:
    resize: int | None = None
    """Resize the short side to this many pixels before cropping, in training (not for crop=resized) and evaluation."""
    crop: Literal["center", "random", "resized"] = "center"
    """Training crop: the centre, a random position, or torchvision's RandomResizedCrop."""
    pad: int = 0
    """Pixels to add on each side before a random crop; see augment.pad-mode."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    """Padding: black (constant), or the image mirrored at its edge (reflect)."""
    scale: tuple[float, float] = (0.08, 1.0)
    """crop=resized: smallest and largest fraction of the image's area."""
    ratio: tuple[float, float] = (0.75, 4 / 3)
    """crop=resized: smallest and largest width / height."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How images are resized, in training and evaluation; both with antialiasing."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    vertical_flip: float = 0.0
    """Probability of a vertical flip."""
    policy: Literal[
        "none", "randaugment", "trivialaugment", "augmix", "autoaugment", "autoaugment_cifar10", "autoaugment_svhn"
    ] = "none"
    """A torchvision policy that changes the colours and geometry of each image. autoaugment: the one for ImageNet."""
    randaugment_ops: int = 2
    """randaugment: number of operations on each image."""
    randaugment_magnitude: int = 9
    """randaugment: strength of each operation, 0 to 30."""
    color_jitter: tuple[float, ...] = ()
    """Colour jitter: strength of brightness, contrast, saturation and hue. One number sets the first three."""
    color_jitter_probability: float = 1.0
    """Probability of colour jitter, if augment.color-jitter is set."""
    grey: float = 0.0
    """Probability of making an image grey."""
    blur: float = 0.0
    """Probability of a Gaussian blur; its sigma is between 0.1 and 2 pixels, drawn at random."""
    erase: float = 0.0
    """Probability of erasing a random rectangle (random erasing)."""
    mixup: float = 0.0
    """Mixup: alpha of the Beta distribution; 0: off."""
    cutmix: float = 0.0
    """CutMix: alpha of the Beta distribution; 0: off. With Mixup on too, each pair uses one of them at random."""
    mix_probability: float = 1.0
    """Probability of mixing a pair of samples (Mixup or CutMix)."""
    mean: tuple[float, ...] | None = None
    """Mean to subtract from each channel (0 to 1); default: that of the weights, else the data's."""
    std: tuple[float, ...] | None = None
    """Standard deviation to divide each channel by (0 to 1); default: as for augment.mean."""


@dataclass(frozen=True)
class Model:
    name: str = "mnist_cnn"
    """A timm model, torchvision/NAME, your own FILE.py:FUNCTION, or ours: digits_cnn, mnist_cnn, alexnet_bn, …;
    or, as timm saves models, hf-hub:ORG/NAME or local-dir:DIR."""
    kwargs: str | None = None
    """More arguments of the model, as JSON: '{"depth": 3}'. In a recipe also as a mapping."""
    pretrained: bool = False
    """Start from published weights. The last layer is new if the number of classes differs."""
    weights: Path | None = None
    """Start from the weights in this file (.safetensors, .pth), run or checkpoint."""
    image_size: int | None = None
    """Input height and width in pixels; default: that of the weights, the data's, or 224."""
    freeze_body: bool = False
    """Train only the last layer; BatchNorm statistics of the other layers do not change."""
    dropout: float | None = None
    """Dropout rate before the classifier, if the model has dropout; default: the model's."""
    drop_path: float | None = None
    """Stochastic depth rate, if the model has it; default: the model's."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the micro-batches of all processes (on GPUs), not over virtual batches."""


@dataclass(frozen=True)
class Optim:
    name: str = "sgd"
    """A timm optimizer: sgd (Nesterov), momentum (plain SGD), adam, adamw, lamb, lion, muon (hidden layers), …"""
    lr: float = 0.1
    """Learning rate for the whole batch, on any number of processes."""
    weight_decay: float = 0.0
    """Weight decay; not for norms and biases, unless optim.decay-all is set."""
    decay_all: bool = False
    """Apply weight decay to norms and biases too, as plain torch.optim does."""
    momentum: float = 0.9
    """Momentum, for optimizers that have it."""
    betas: tuple[float, float] | None = None
    """Betas of Adam and similar optimizers; default: the optimizer's."""
    eps: float | None = None
    """Epsilon; default: the optimizer's."""
    layer_decay: float | None = None
    """Learning rate of each layer, as a multiple (0 to 1) of the next layer's."""
    clip: float | None = None
    """Clip gradients to this value; see optim.clip-mode."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """Clip by the norm of all gradients, by value, or by the norm of each weight (AGC)."""


@dataclass(frozen=True)
class Schedule:
    name: Literal["constant", "cosine", "step", "multistep", "poly", "plateau"] = "constant"
    """Learning rate after the warm-up; all but plateau depend on the update number alone."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from schedule.warmup-lr to optim.lr."""
    warmup_lr: float = 0.0
    """Learning rate at the start of the warm-up."""
    min_lr: float = 0.0
    """cosine, poly, plateau: lowest learning rate."""
    step_epochs: float = 30.0
    """step: epochs from one decay to the next, counted from the start of the run."""
    milestones: tuple[int, ...] = ()
    """multistep: epochs after which the learning rate decays."""
    decay: float = 0.1
    """step, multistep, plateau: factor of one decay."""
    power: float = 1.0
    """poly: exponent; 1 is a straight line to schedule.min-lr."""
    patience_epochs: int = 10
    """plateau: decay after more than this many epochs without a better value of best-metric."""


@dataclass(frozen=True)
class Loss:
    name: str = "cross_entropy"
    """cross_entropy; bce (binary_cross_entropy): a yes or no for each class, so an image may have several labels; or
    your own FILE.py:FUNCTION."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread over all classes, in training only."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: weight samples inversely to the size of their class; the mean weight is 1."""
    # The mean is over the training samples. With label smoothing, the weight multiplies the whole loss of a sample.
    # torch's CrossEntropyLoss(weight, label_smoothing) differs: it weights each class's part of the smoothed target by
    # the weight of that class, and divides by the sum of the weights.


@dataclass(frozen=True)
class Ema:
    enabled: bool = False
    """Keep an exponential moving average (EMA) of the weights, evaluated and saved too."""
    decay: float = 0.9998
    """Fraction of the old average that each update keeps."""
    warmup: bool = False
    """Let ema.decay grow from 0 to its value during the first updates."""


@dataclass(frozen=True)
class Stop:
    patience_epochs: int | None = None
    """End the run after this many epochs without a better value of best-metric (early stopping); default: never."""
    hours: float | None = None
    """End the run after the epoch in which its total time over all starts reaches this many hours; default: never."""


@dataclass(frozen=True)
class Checkpoint:
    every_epochs: int = 1
    """Save after every N epochs, and after the last epoch."""
    every_updates: int | None = None
    """Save after every N updates too."""
    every_seconds: float = 600.0
    """Save after every N seconds too; 0: never by time."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best one by best-metric."""
    milestone_epochs: int | None = None
    """Never delete the checkpoint of every N-th epoch."""
