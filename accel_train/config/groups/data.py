"""The options of the data: the group `data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.config.declaration import (
    COUNT,
    DECIDES_SAMPLES,
    NEEDS_SHARDS,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    SPLIT,
    Bound,
    Free,
)
from accel_train.config.url import is_url


@dataclass(frozen=True)
class Data:
    name: Annotated[
        str,
        DECIDES_SAMPLES,
    ] = "digits"
    """digits, mnist, fashion_mnist, kmnist, cifar10, cifar100, folder, csv (data.root is the table), synthetic,
    tar, wds, torch/NAME, hfds/NAME, or your own FILE.py:FUNCTION."""
    root: Annotated[
        Path,
        Free("the next machine may keep the same data in another folder"),
    ] = Path("data")
    """Folder of the dataset, a table, or the folder torchvision downloads to; tar, wds, hfds/parquet: also the URL
    of a folder or of files: s3://bucket/train, https://host/train-{0000..0127}.tar, hf://datasets/user/name."""
    val_fraction: Annotated[
        float,
        PART,
        DECIDES_SAMPLES,
    ] = 0.0
    """Fraction of the training samples for validation, if the dataset has no such split."""
    test_fraction: Annotated[float, PART, DECIDES_SAMPLES] = 0.0
    """Fraction of the samples for the test, if the dataset has no such split."""
    train_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """folder, hfds: the folder, or the split of the hub, to train on; default: train or training."""
    val_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """The same for validation; default: val, valid, validation or dev."""
    test_split: Annotated[str | None, SPLIT, DECIDES_SAMPLES] = None
    """The same for the test; default: test or testing."""
    only_classes: Annotated[tuple[str, ...], DECIDES_SAMPLES] = ()
    """Use only the images of these classes, by name; their order is that of the model's outputs. Default: all."""
    train_limit: Annotated[
        int | None,
        POSITIVE,
        DECIDES_SAMPLES,
    ] = None
    """Use only this many training samples."""
    test_limit: Annotated[int | None, POSITIVE] = None
    """Use only this many samples of the validation split, and of the test split."""
    sampler: Annotated[
        Literal["shuffle", "balanced", "weights"],
        DECIDES_SAMPLES,
    ] = "shuffle"
    """shuffle: each training sample once an epoch; balanced: draw each class equally often, in an epoch of the same
    length; weights: draw samples by their weights in the data."""
    order: Annotated[Literal["full", "shards"], DECIDES_SAMPLES] = "full"
    """full: random over the whole set; shards (for tar and wds): open a few shards at a time and shuffle among
    these, for data on a network file system or in an object store (docs/large_data.md)."""
    open_shards: Annotated[int, POSITIVE, NEEDS_SHARDS, DECIDES_SAMPLES] = 16
    """data.order=shards: how many shards each canonical node mixes at a time."""
    canonical_nodes: Annotated[int | None, POSITIVE, NEEDS_SHARDS, DECIDES_SAMPLES] = None
    """data.order=shards: parts of an update, each with shards of its own; a multiple of the processes or machines is
    best. A divisor of the batch size; default: 8, or else 4, 2 or 1."""
    repeats: Annotated[int, COUNT, DECIDES_SAMPLES] = 1
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
    ] = "auto"
    """Where images are kept: device memory, host memory or disk; auto: the fastest with enough room."""
    stage: Annotated[Path | None, Free("where the files are copied to, not what is in them")] = None
    """tar, wds, hfds/parquet: copy the files of data.root, a URL or a slow path, to this folder on a disk of the node
    before the training, and keep them; default for a URL: the job's local directory, else ~/.cache/accel_train."""
    reduced_decode: bool = True
    """In training, decode JPEGs of at least twice the needed size at a reduced size, which is faster."""
    # 1.4 to 2 times as fast. Median PSNR against Pillow's resize of the full image: 48 dB; with false: 61 dB.
    image_column: Annotated[str | None, DECIDES_SAMPLES] = None
    """csv and hfds: the column of the images (csv: of their files); default: found by name or type."""
    label_column: Annotated[str | None, DECIDES_SAMPLES] = None
    """csv and hfds: the column of the labels; default: found by its name or type."""
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
    ] = None
    """Image-loading workers of each process; default: 0 for data in memory, else all cores."""
    channels: Annotated[int, Bound("1 or 3", lambda x: x in (1, 3))] = 3
    """Image files: 1 converts them to greyscale. synthetic: 1 or 3."""

    @property
    def is_staged(self) -> bool:
        """Whether this node keeps a copy of the files: data.root is a URL, or data.stage is given."""
        return is_url(self.root) or self.stage is not None
