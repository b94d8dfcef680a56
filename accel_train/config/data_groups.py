"""The options of the data and of its augmentation: the groups `data` and `augment`; see groups.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from accel_train.config.declaration import (
    ABOVE_0,
    ALL_POSITIVE,
    COUNT,
    DECIDES_SAMPLES,
    FRACTION,
    INTERVAL,
    JITTER,
    NOT_NEGATIVE,
    OWN,
    PART,
    PIXELS,
    POLICIES,
    POLICY,
    POSITIVE,
    SHARES,
    SIZE,
    SPLIT,
    Bound,
    Free,
    Interpolation,
    Synonyms,
)


@dataclass(frozen=True)
class Data:
    name: Annotated[
        str,
        DECIDES_SAMPLES,
        Synonyms(
            "data dataset dataset-name data-name train-data csv csv-file csv-path train-csv labels-csv "
            "label-file labels-file annotations annotation-file annotations-file",
            beside="data.root",
        ),
    ] = "digits"
    """digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, csv (data.root is the table), cache, synthetic,
    tar, wds, torch/NAME, hfds/NAME, hfids/NAME, tfds/NAME, or your own FILE.py:FUNCTION."""
    root: Annotated[
        Path,
        Free("the next machine may keep the same data in another folder"),
        Synonyms(
            "data-dir data-path datadir data-root dataset-dir dataset-path root-dir train-dir traindir data-folder"
        ),
    ] = Path("data")
    """Folder of the dataset, a cache file, or the folder torchvision downloads to; of tar and wds also the URL of a
    folder or of files: s3://bucket/train, https://host/train-{0000..0127}.tar, hf://datasets/user/name."""
    val_fraction: Annotated[
        float,
        PART,
        DECIDES_SAMPLES,
        Synonyms("val-size val-ratio validation-fraction val-percent val-pct"),
        Synonyms("val-split validation-split", beside="data.val-split"),
    ] = 0.0
    """Fraction of the training samples for validation, if the dataset has no such split."""
    test_fraction: Annotated[
        float, PART, DECIDES_SAMPLES, Synonyms("test-size test-ratio"), Synonyms("test-split", beside="data.test-split")
    ] = 0.0
    """Fraction of the samples for the test, if the dataset has no such split."""
    train_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """folder, hfds, hfids, tfds: the folder, or the split of the hub, to train on. Of hfds and tfds also a part of one:
    train[:90%]. Default: train or training."""
    val_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """The same for validation; default: val, valid, validation or dev."""
    test_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """The same for the test; default: test or testing."""
    only_classes: Annotated[
        tuple[str, ...], DECIDES_SAMPLES, Synonyms("classes class-subset", beside="data.classes")
    ] = ()
    """Use only the images of these classes, by name; their order is that of the model's outputs. Default: all."""
    class_map: Annotated[Path | None, DECIDES_SAMPLES, Synonyms("class-names class-list classes-file")] = None
    """The classes and their order in a text file, a name a line, as timm's; images of other classes are left out."""
    train_limit: Annotated[
        int | None,
        POSITIVE,
        DECIDES_SAMPLES,
        Synonyms("limit-train-batches max-train-samples train-samples subset num-samples"),
    ] = None
    """Use only this many training samples."""
    test_limit: Annotated[int | None, POSITIVE, Synonyms("limit-val-batches limit-test-batches max-eval-samples")] = (
        None
    )
    """Use only this many samples of the validation split, and of the test split."""
    sampler: Annotated[
        Literal["shuffle", "balanced", "weights"],
        DECIDES_SAMPLES,
        Synonyms(
            "weighted-sampler weighted-random-sampler weightedrandomsampler balanced-sampler class-balanced "
            "balanced-sampling weighted-sampling oversample oversampling imbalanced-sampler sample-weights"
        ),
    ] = "shuffle"
    """shuffle: each training sample once an epoch; balanced: draw each class equally often, in an epoch of the same
    length; weights: draw samples by their weights in the data."""
    order: Annotated[Literal["full", "shards"], DECIDES_SAMPLES] = "full"
    """full: random over the whole set; shards (for tar and wds): open a few shards at a time and shuffle among these,
    for data on a network file system or in an object store (docs/large_data.md)."""
    open_shards: Annotated[int, POSITIVE, DECIDES_SAMPLES] = 16
    """data.order=shards: how many shards each canonical node mixes at a time."""
    canonical_nodes: Annotated[int | None, POSITIVE, DECIDES_SAMPLES, Synonyms("num-canonical-nodes")] = None
    """data.order=shards: parts of an update, each with shards of its own; a multiple of the processes or machines is
    best. A divisor of the batch size; default: 8, or else 4, 2 or 1."""
    repeats: Annotated[
        int, COUNT, DECIDES_SAMPLES, Synonyms("aug-repeats ra-reps ra-sampler repeated-aug repeated-augmentation")
    ] = 1
    """Repeated augmentation: each sample is so many times in its update, augmented differently; an epoch is as long as
    before, so it has a part of the samples only."""
    drop_last: bool = False
    """Skip an epoch's last samples if they do not fill a batch (else: a smaller batch)."""
    skip_unreadable: Annotated[
        Path | None, Free("it leaves out images that end a run otherwise; all others keep their index")
    ] = None
    """Skip the images in this list, which `accel-train check-data` writes."""
    verify: Annotated[bool, Free("it compares the images with their index, and changes none")] = False
    """Compare all image files and tar headers with the index of the data at the start, and make it anew."""
    placement: Annotated[
        Literal["auto", "device", "host", "disk"],
        Free("where the pixels are kept, not their values"),
        Synonyms("cache-images ram-cache"),
    ] = "auto"
    """Where images are kept: device memory, host memory or disk; auto: the fastest with enough room."""
    cache_dir: Annotated[Path | None, Free("where copies of shards are kept, not what is in them")] = None
    """Folder on a disk of this node for the shards of a data.root that is a URL, shared by its processes and kept for
    the next start; default: ~/.cache/accel_train/shards."""
    cache_size: Annotated[str | None, SIZE, Free("how many copies of shards are kept, not what is in them")] = None
    """The shards of one data.root take at most this much of data.cache-dir, such as 200GB; default: all are kept."""
    reduced_decode: bool = True
    """In training, decode JPEGs of at least twice the needed size at a reduced size, which is faster."""
    # 1.4 to 2 times as fast. Median PSNR against Pillow's resize of the full image: 48 dB; with false: 61 dB.
    image_column: Annotated[
        str | None, DECIDES_SAMPLES, Synonyms("image-column-name image-col input-key image-key")
    ] = None
    """csv, hfds and hfids: the column of the images (csv: of their files); default: found by its name or type."""
    label_column: Annotated[
        str | None, DECIDES_SAMPLES, Synonyms("label-column-name label-col target-key label-key target-column")
    ] = None
    """csv, hfds and hfids: the column of the labels; default: found by its name or type."""
    max_pixels: Annotated[
        int, POSITIVE, Free("it leaves out images that end a run otherwise; all others keep their index")
    ] = 178_956_970
    """Refuse larger images: a small malicious file can fill the memory when decoded."""
    range: Annotated[tuple[float, float] | None, Bound("two numbers, the first one smaller", lambda x: x[0] < x[1])] = (
        None
    )
    """The values of black and white in images of more than 8 bits, such as 0 1 or 0 4095; default: 0 65535 for 16 bits;
    floats and 32-bit integers have none, and are refused."""
    workers: Annotated[
        int | None,
        NOT_NEGATIVE,
        Free("how an update is computed, not its result"),
        Synonyms("num-workers j nworkers n-workers dataloader-num-workers num-data-workers"),
    ] = None
    """Image-loading workers of each process; default: 0 for data in memory, else all cores."""
    image_size: Annotated[int, POSITIVE] = 32
    """synthetic: height and width of an image, in pixels."""
    channels: Annotated[
        int, Bound("1 or 3", lambda x: x in (1, 3)), Synonyms("in-chans in-channels num-channels grayscale")
    ] = 3
    """synthetic: 1 or 3. Image files: 1 converts them to greyscale."""
    classes: Annotated[int, Bound("at least 2", lambda x: x >= 2)] = 10
    """synthetic: number of classes."""
    train_images: Annotated[int, POSITIVE, DECIDES_SAMPLES] = 2048
    """synthetic: number of training images."""
    test_images: Annotated[int, POSITIVE] = 512
    """synthetic: number of test images."""


@dataclass(frozen=True)
class Augment:
    resize: Annotated[int | None, POSITIVE, Synonyms("val-resize-size resize-size")] = None
    """Resize the short side to this many pixels before cropping, in evaluation, and in training if augment.crop is
    center or random."""
    crop_fraction: Annotated[float | None, ABOVE_0, Synonyms("crop-pct")] = None
    """In evaluation the crop has this fraction of the image's short side, at any size, as with timm's crop_pct; in
    place of augment.resize. Training: as without either."""
    crop: Annotated[
        Literal["center", "random", "resized", "rkrc", "rkrr", "squash"],
        Synonyms("random-crop random-resized-crop rrc train-crop-mode"),
    ] = "center"
    """Training crop: the centre; a random position; torchvision's RandomResizedCrop (resized); timm's rkrc or rkrr:
    nearly the whole image in its proportions, its centre or a random position; or the whole image as a square (squash).
    """
    pad: Annotated[int, NOT_NEGATIVE] = 0
    """Pixels to add on each side before a random crop; see augment.pad-mode."""
    pad_mode: Literal["constant", "reflect"] = "constant"
    """Padding: black (constant), or the image mirrored at its edge (reflect)."""
    scale: Annotated[tuple[float, float], INTERVAL] = (0.08, 1.0)
    """crop=resized, rkrc, rkrr: smallest and largest fraction of the image's area."""
    ratio: Annotated[tuple[float, float], INTERVAL] = (0.75, 4 / 3)
    """crop=resized: smallest and largest width / height; rkrc, rkrr: its change, such as 0.9 1.1."""
    interpolation: Annotated[Interpolation, Synonyms("interp resample")] = "bilinear"
    """How images are resized, in training and evaluation, all but nearest with antialiasing; and how augment.policy
    turns them."""
    train_interpolation: Literal[Interpolation, "random"] | None = None
    """Another one in training; random: bilinear or bicubic, drawn for each image. Default: augment.interpolation."""
    flip: Annotated[float, FRACTION, Synonyms("hflip fliplr horizontal-flip random-flip random-horizontal-flip")] = 0.0
    """Probability of a horizontal flip."""
    vertical_flip: Annotated[float, FRACTION, Synonyms("vflip random-vertical-flip flip-vertical flipud")] = 0.0
    """Probability of a vertical flip."""
    degrees: Annotated[float, NOT_NEGATIVE, Synonyms("rotation random-rotation rotate random-affine")] = 0.0
    """Turn each image by at most so many degrees, to either side."""
    translate: Annotated[float, FRACTION] = 0.0
    """Shift each image by at most this fraction of its side."""
    zoom: Annotated[tuple[float, float], INTERVAL] = (1.0, 1.0)
    """Scale each image, cropped already, by a factor between these two."""
    shear: Annotated[float, NOT_NEGATIVE] = 0.0
    """Shear each image by at most so many degrees, to either side."""
    perspective: Annotated[float, FRACTION, Synonyms("random-perspective")] = 0.0
    """Distort the perspective: how far the corners move, as a fraction of half the side."""
    perspective_probability: Annotated[float, FRACTION] = 0.5
    """Probability of distorting the perspective, if augment.perspective is set."""
    fill: Annotated[tuple[int, ...], PIXELS] = ()
    """Colour outside the image where it is turned or shifted, 0 to 255: one number, or one of each channel. Default:
    black; for timm's policies the mean colour."""
    policy: Annotated[
        str,
        POLICY,
        Synonyms("aa auto-augment autoaugment randaugment rand-augment trivialaugment augmix augmentation augment"),
    ] = "none"
    """What changes the colours and geometry of each image. torchvision's randaugment, trivialaugment, augmix,
    autoaugment (the one for ImageNet), autoaugment_cifar10 and autoaugment_svhn; or timm's, as timm writes them:
    rand-m9-mstd0.5-inc1, augmix-m5-w4-d2, original-mstd0.5, v0, 3a, …"""
    own: Annotated[str, OWN] = "none"
    """Your own transform of each image after its crop, FILE.py:NAME: of torchvision, albumentations or a function."""
    randaugment_ops: Annotated[int, POSITIVE] = 2
    """randaugment: number of operations on each image."""
    randaugment_magnitude: Annotated[
        int, Bound("a number from 0 to 30", lambda x: 0 <= x <= 30), Synonyms("ra-magnitude")
    ] = 9
    """randaugment: strength of each operation, 0 to 30, as in torchvision: 9 turns by 9 degrees. timm's rand-m9 turns
    by 27, and leaves out half of the operations."""
    augmix_severity: Annotated[int, Bound("a number from 1 to 10", lambda x: 1 <= x <= 10)] = 3
    """augmix: strength of each operation at most, 1 to 10, as in torchvision. (That of timm's augmix-m5 is its m.)"""
    color_jitter: Annotated[tuple[float, ...], JITTER, Synonyms("colour-jitter jitter colorjitter")] = ()
    """Colour jitter: strength of brightness, contrast, saturation and hue. One number sets the first three."""
    color_jitter_probability: Annotated[float, FRACTION, Synonyms("color-jitter-prob")] = 1.0
    """Probability of colour jitter, if augment.color-jitter is set."""
    grey: Annotated[float, FRACTION, Synonyms("grayscale-prob random-grayscale")] = 0.0
    """Probability of making an image grey."""
    blur: Annotated[float, FRACTION, Synonyms("gaussian-blur-prob gaussian-blur")] = 0.0
    """Probability of a Gaussian blur; its sigma is between 0.1 and 2 pixels, drawn at random."""
    erase: Annotated[float, FRACTION, Synonyms("reprob random-erase random-erasing erasing cutout")] = 0.0
    """Probability of erasing a random rectangle (random erasing)."""
    erase_mode: Annotated[Literal["const", "rand", "pixel"], Synonyms("remode")] = "const"
    """Fill erased rectangles with the mean colour (const), a random colour (rand), or a random colour of each pixel."""
    erase_count: Annotated[int, COUNT, Synonyms("recount")] = 1
    """Erase up to this many rectangles, which share the area."""
    mixup: Annotated[float, NOT_NEGATIVE, Synonyms("mixup-alpha mix-up")] = 0.0
    """Mixup: alpha of the Beta distribution; 0: off."""
    cutmix: Annotated[float, NOT_NEGATIVE, Synonyms("cutmix-alpha cut-mix")] = 0.0
    """CutMix: alpha of the Beta distribution; 0: off. With Mixup on too, one of them is drawn: augment.mix-mode."""
    cutmix_minmax: Annotated[tuple[float, float] | None, SHARES] = None
    """CutMix with boxes whose sides have between these two fractions of the image's, in place of augment.cutmix."""
    mix_probability: Annotated[float, FRACTION, Synonyms("mixup-prob cutmix-prob")] = 1.0
    """Probability of mixing (Mixup or CutMix), of each pair: see augment.mix-mode."""
    switch_probability: Annotated[float, FRACTION, Synonyms("mixup-switch-prob")] = 0.5
    """Probability of CutMix, not Mixup, if both are on."""
    mix_mode: Annotated[Literal["pair", "elem", "batch"], Synonyms("mixup-mode")] = "pair"
    """What is mixed in one way, with one share: each pair; each sample (elem), with its neighbour; or all pairs of a
    virtual batch (batch)."""
    mix_epochs: Annotated[int | None, POSITIVE, Synonyms("mixup-off-epoch")] = None
    """Mix in the first N epochs only; default: in all."""
    mean: tuple[float, ...] | None = None
    """Mean to subtract from each channel (0 to 1); default: that of the weights, else the data's."""
    std: Annotated[tuple[float, ...] | None, ALL_POSITIVE] = None
    """Standard deviation to divide each channel by (0 to 1); default: as for augment.mean."""

    @property
    def cuts(self) -> bool:
        """Whether CutMix is on."""
        return self.cutmix > 0 or self.cutmix_minmax is not None

    @property
    def mixes(self) -> bool:
        """Whether neighbouring samples are mixed in pairs."""
        return self.mixup > 0 or self.cuts

    @property
    def timm_policy(self) -> bool:
        """Whether augment.policy is written as timm writes it."""
        return self.policy not in POLICIES

    @property
    def turns(self) -> bool:
        """Whether images are turned, shifted, scaled or sheared apart from a policy."""
        return self.degrees > 0 or self.translate > 0 or self.shear > 0 or self.zoom != (1.0, 1.0)

    @property
    def draws_globally(self) -> bool:
        """Whether something draws from a global generator, which must be seeded for each image."""
        transforms = self.policy != "none" or self.own != "none" or self.turns or self.perspective > 0
        return transforms or self.crop == "random"

    @property
    def each_image(self) -> bool:
        """Whether images of one size, too, are augmented one at a time, by data workers."""
        transforms = self.policy != "none" or self.own != "none" or self.turns or self.perspective > 0
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
