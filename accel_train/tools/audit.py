"""The work of `accel-train check-data`: read every image of a data set once, and say what blocks or spoils a training.

Found are images that cannot be read, classes without images, rows of a table without a file, equal images in different
splits or with different labels, and images in different splits that look alike. Equal are the decoded pixels: the same
picture with other metadata, or as PNG and as BMP, is equal. Images look alike if their perceptual hashes differ in at
most DISTANCE of 64 bits, and their thumbnails correlate. The first is quickly found, the second rules out chance. In
4,000 photographs of cats and dogs these limits find two pairs, each one photograph in two files; no other pair comes
near. A copy that is compressed again (JPEG quality 10), resized to any size, or brighter by a fifth is found; one that
has lost a border of 2 % is found in three of four cases.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.fft import dctn
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch.nn.functional import interpolate

from accel_train.config.schema import Data
from accel_train.data.sources.divide import check_own_list, default_list, divide, real, write_list
from accel_train.data.sources.images import EncodedImages
from accel_train.data.sources.load import read_splits
from accel_train.data.sources.splits import Source, Splits, count_classes, label_numbers, names_root, unwrap_subset
from accel_train.errors import UserError, counted, first_of, writing
from accel_train.files import atomic_write, check_writable
from accel_train.launch.process import available_cores
from accel_train.tools.pool import in_processes, jobs_of, progress_bar

CHUNK = 64  # images of one job
THUMBNAIL = 16  # pixels a side
COPY, SMALL_COPY = 64, 32  # pixels a side of what thumbnail and hash are computed from; the latter of small images
DISTANCE = 4  # bits
ALIKE = 0.98
SMALL, ALIKE_SMALL = 48, 0.998
"""Images with a side below SMALL pixels must correlate more: in few pixels, different things look alike. With 0.98,
19,956 pairs of MNIST's digits are alike, all of them different ones; with 0.998 one pair of ones."""
FLAT = 0.01  # of the largest value: the hash of an image with less contrast says nothing
BLOCK = 2048  # images that are compared with as many others at a time
MOST_PAIRS = 1 << 20  # that are kept before they become groups
UNREADABLE_SHOWN, GROUPS_SHOWN, IMAGES_SHOWN, CLASSES_SHOWN = 10, 3, 3, 10

RECORD = np.dtype(
    [
        ("readable", "u1"),
        ("pixels", "<u8", 2),  # a hash of the decoded pixels
        ("look", "<u8"),  # the perceptual hash
        ("height", "<i4"),
        ("width", "<i4"),
        ("spread", "<f4"),  # standard deviation of the thumbnail, on the scale of the values
        ("thumbnail", "i1", THUMBNAIL * THUMBNAIL),  # of mean 0 and standard deviation 32
    ]
)
"""What is kept of each image."""
Records = npt.NDArray[Any]
"""RECORD [n]."""
Groups = list[npt.NDArray[np.int64]]
"""The numbers of the images of each group, sorted; groups by their first image."""


@dataclass(frozen=True)
class Images:
    """The images of several splits, numbered one split after the other."""

    sources: dict[str, Source]
    """train, val, test: those that there are."""
    classes: tuple[str, ...]
    root: Path
    """The path to which names are relative."""

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64 [splits + 1]: the number of the first image of each split, and of all images."""
        return np.cumsum([0, *map(len, self.sources.values())])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def describe(self, id: int) -> dict[str, str]:
        """Return name (its path relative to the data's root, or "mnist train image 17"), split and label (the names of
        its classes, or "none") of an image."""
        number = int(np.searchsorted(self.starts, id, side="right")) - 1
        split, source = list(self.sources.items())[number]
        within = id - int(self.starts[number])
        labels = label_numbers(source.labels[within])
        names = [self.classes[label] if 0 <= label < len(self.classes) else str(label) for label in labels]
        name = source.name(within).removeprefix(f"{self.root}/")
        return {"name": name, "split": split, "label": ", ".join(names) or "none"}

    @cached_property
    def split_numbers(self) -> npt.NDArray[np.int64]:
        """int64 [n]: the number of the split of each image."""
        return np.repeat(np.arange(len(self.sources)), np.diff(self.starts))

    @cached_property
    def label_numbers(self) -> npt.NDArray[np.int64]:
        """int64 [n]: a number for each image that is the same for those with the same class, or the same classes."""
        labels = [source.labels.numpy() for source in self.sources.values()]
        if len({part.shape[1:] for part in labels}) > 1:  # a mistake that is told elsewhere
            return np.zeros(len(self), dtype=np.int64)
        every = np.concatenate(labels)
        if every.ndim == 1:
            return every.astype(np.int64)
        _, numbers = np.unique(np.packbits(every, axis=1), axis=0, return_inverse=True)
        return numbers.reshape(-1).astype(np.int64)

    @cached_property
    def counts(self) -> dict[str, list[int]]:
        """How many images of each class a split has."""
        counts = {}
        for split, source in self.sources.items():
            labels = source.labels
            if labels.ndim == 1:
                labels = labels[(labels >= 0) & (labels < len(self.classes))]
            counts[split] = count_classes(labels, len(self.classes))
        return counts


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read."""

    id: int
    """Its number in its source; in an `AuditResult` that of all images."""
    why: str


@dataclass(frozen=True)
class Finding:
    """Something that was found, and what to do about it."""

    kind: str
    title: str
    """What was found, with numbers: "3 images cannot be read"."""
    advice: str
    groups: Sequence[Sequence[int]] = field(default=(), repr=False)
    """The numbers of the images: of each group of equal or similar ones, else of each image alone."""
    names: tuple[str, ...] = ()
    """Of what is no image: classes, files that are missing."""


@dataclass(frozen=True)
class AuditResult:
    """What an audit has found, and where it is written."""

    name: str
    """--data.name of the data."""
    root: Path
    images: Images = field(repr=False)
    findings: tuple[Finding, ...]
    mistakes: tuple[str, ...]
    """Why the data cannot be trained on as it is."""
    notes: tuple[str, ...]
    """Warnings about how the data is read."""
    unreadable: tuple[Unreadable, ...] = field(repr=False)
    json: Path
    """The file with all of this."""
    unreadable_list: Path | None
    """The list for --data.skip-unreadable; None: the images are no files."""

    @property
    def stops_training(self) -> bool:
        """Whether a training on this data would end with an error."""
        return bool(self.mistakes or self.unreadable)

    def finding(self, kind: str) -> Finding | None:
        """What was found of this kind."""
        return next((each for each in self.findings if each.kind == kind), None)

    def as_dict(self) -> dict[str, Any]:
        """What the JSON file has."""
        why = {each.id: each.why for each in self.unreadable}
        return {
            "data": {"name": self.name, "root": real(self.root)},
            "images": len(self.images),
            "classes": self.images.classes,
            "counts": self.images.counts,
            "mistakes": self.mistakes,
            "notes": self.notes,
            "findings": [
                {
                    "kind": each.kind,
                    "title": each.title,
                    "advice": each.advice,
                    "names": each.names,
                    "groups": [
                        [self.images.describe(id) | ({"why": why[id]} if id in why else {}) for id in group]
                        for group in each.groups
                    ],
                }
                for each in self.findings
            ],
        }


def check_data(
    data: Data,
    *,
    output: Path | None = None,
    json_file: Path | None = None,
    processes: int | None = None,
    shows_progress: bool = False,
) -> AuditResult:
    """Look at all images of `data`, in `processes` processes (default: all cores), and write what was found.

    `output`: the list of unreadable images; default: unreadable-NAME.txt. `json_file`: default: audit-NAME.json beside
    the list. Both are written whole or not at all, and the list never over that of another data set. Raises UserError.
    """
    whole = replace(data, skip_unreadable=None, val_fraction=0.0, test_fraction=0.0, train_limit=None, test_limit=None)
    output = output or default_list(data)
    json_file = json_file or output.with_name(f"audit-{output.stem.removeprefix('unreadable-')}.json")
    splits, mistakes = _read_splits(whole)
    named = {"train": splits.to_train_on, "val": splits.validation, "test": splits.test}
    sources = {split: source for split, source in named.items() if source is not None and len(source)}
    images = Images(sources, splits.classes, names_root(data))
    listed = output if isinstance(unwrap_subset(splits.train)[0], EncodedImages) else None
    if listed is not None:
        check_writable("--output", listed)
        check_own_list(listed, whole)
    check_writable("--json", json_file)

    records, unreadable = _look_at_all(images, processes, shows_progress=shows_progress)
    findings = tuple(_findings(splits, images, records, unreadable))
    ignored = [f"Not used: {splits.ignored}."] if splits.ignored else []  # HEIC and raw files may be among them
    notes = (*splits.notes, *ignored)
    result = AuditResult(data.name, data.root, images, findings, mistakes, notes, tuple(unreadable), json_file, listed)
    if listed is not None:
        with writing("--output", listed):
            write_list(listed, whole, (images.describe(each.id)["name"] for each in unreadable))
    with writing("--json", json_file):
        atomic_write(json_file, json.dumps(result.as_dict(), indent=1) + "\n")
    return result


def _read_splits(data: Data) -> tuple[Splits, tuple[str, ...]]:
    """The whole data set, and why it cannot be trained on."""
    splits = read_splits(data)
    if not len(splits.train):
        divide(splits, data, seed=0)  # raises the error
    mistakes = [splits.mistake] * bool(splits.mistake)
    try:
        splits = divide(splits, data, seed=0)
    except UserError as error:  # an audit tells all that is wrong
        mistakes += error.messages
    return splits, tuple(mistakes)


def _look_at_all(images: Images, processes: int | None, *, shows_progress: bool) -> tuple[Records, list[Unreadable]]:
    """The records of all images, and those that are unreadable."""
    sources = list(images.sources.values())
    records = np.zeros(len(images), RECORD)
    unreadable: list[Unreadable] = []
    jobs = jobs_of(sources, CHUNK)
    with progress_bar("decoding", len(images), shows_progress=shows_progress) as advance:
        looked = in_processes(look, sources, jobs, processes or available_cores())
        for (number, first, last), (part, bad) in zip(jobs, looked, strict=True):
            start = int(images.starts[number])
            records[start + first : start + last] = part
            unreadable += [replace(each, id=start + each.id) for each in bad]
            advance(last - first)
    return records, unreadable


# One image


def look(source: Source, first: int, last: int) -> tuple[Records, list[Unreadable]]:
    """Return the records of images first..last-1, and those that cannot be read."""
    held, ids = unwrap_subset(source)
    records, unreadable = np.zeros(last - first, RECORD), list[Unreadable]()
    if held.in_memory and isinstance(pixels := source.fetch(range(first, last)), torch.Tensor):
        measure(pixels, records)
        return records, unreadable
    for row, id in enumerate(range(first, last)):
        within = id if ids is None else int(ids[id])
        try:
            image = held.open(within).pixels() if isinstance(held, EncodedImages) else source.fetch([id])[0]
        except UserError as error:
            unreadable.append(Unreadable(id, str(error.__cause__ or error)))
        else:
            measure(image[None], records[row : row + 1])
    return records, unreadable


def measure(pixels: torch.Tensor, records: Records) -> None:
    """Write into `records` [n] what follows from the pixels, uint8 or float32 [n, C, H, W]."""
    count, channels, height, width = pixels.shape
    records["readable"], records["height"], records["width"] = 1, height, width
    stored = pixels.permute(0, 2, 3, 1).contiguous().numpy()  # as a decoder has them: it copies nothing
    about = f"{pixels.dtype} {height} {width} {channels}".encode()
    for number in range(count):
        digest = blake2b(about, digest_size=16)
        digest.update(stored[number].data)
        records["pixels"][number] = np.frombuffer(digest.digest(), np.uint64)

    small = pixels if pixels.dtype == torch.uint8 else pixels.float().nan_to_num(0.0, 0.0, 0.0)
    side = SMALL_COPY if min(height, width) < COPY else COPY
    copy = interpolate(small, (side, side), mode="bilinear", antialias=True).float().numpy()
    grey = _shrunk(copy.mean(1), SMALL_COPY)
    records["look"] = perceptual_hash(grey)
    thumbnail = _shrunk(grey, THUMBNAIL).reshape(count, -1)
    thumbnail = thumbnail - thumbnail.mean(1, keepdims=True)
    records["spread"] = spread = thumbnail.std(1)
    scaled = 32 * thumbnail / np.maximum(spread, 1e-6)[:, None]
    records["thumbnail"] = scaled.round().clip(-127, 127).astype(np.int8)


def perceptual_hash(grey: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """uint64 [n] of images [n, 32, 32]: for each of the 8x8 lowest frequencies of the cosine transform, whether it is
    above their median (pHash: Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010)."""
    lowest = dctn(grey, axes=(1, 2), norm="ortho")[:, :8, :8].reshape(-1, 64)
    bits = lowest > np.median(lowest, axis=1, keepdims=True)
    return np.packbits(bits, axis=1).view(np.uint64)[:, 0]


def _shrunk(grey: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.float32]:
    """Images [n, k * size, k * size] as [n, size, size]."""
    count, factor = len(grey), grey.shape[1] // size
    parts: npt.NDArray[np.float32] = grey.reshape(count, size, factor, size, factor).mean((2, 4))
    return parts


# Equal images, and images that look alike


def equal_images(records: Records) -> Groups:
    """The groups of two or more readable images with the same pixels."""
    ids = np.flatnonzero(records["readable"])
    _, numbers = np.unique(records["pixels"][ids], axis=0, return_inverse=True)
    return _grouped(ids, numbers.reshape(-1))


def similar_images(records: Records, splits: npt.NDArray[np.int64], white: float = 255.0) -> Groups:
    """The groups of images in different splits that look alike and are not equal.

    `splits`: int64 [n], the split of each image, one after the other. `white`: the largest value.
    """
    usable = np.flatnonzero((records["readable"] == 1) & (records["spread"] > FLAT * white))
    keys = np.column_stack([records["pixels"][usable], splits[usable].astype(np.uint64)])
    _, first = np.unique(keys, axis=0, return_index=True)  # of equal images one for each split
    ids = np.sort(usable[first])
    images, split = records[ids], splits[ids]
    members = np.arange(len(ids))  # the number of its group, of each image
    pairs: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(ids), BLOCK):
        later = int(np.searchsorted(split, split[start], side="right"))  # the first image of the next split
        for begin in range(later, len(ids), BLOCK):
            left, right = _alike(images[start : start + BLOCK], images[begin : begin + BLOCK])
            left, right = left + start, right + begin
            keep = (split[left] != split[right]) & (members[left] != members[right])
            pairs.append(np.stack([left[keep], right[keep]]))
            if sum(part.shape[1] for part in pairs) > MOST_PAIRS:
                members, pairs = _joined(members, pairs), []
    return _grouped(ids, _joined(members, pairs))


def _grouped(ids: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Groups:
    """The groups of two or more of the images `ids`, which are sorted, whose `numbers` are the same."""
    order = np.argsort(numbers, kind="stable")
    groups = np.split(ids[order], 1 + np.flatnonzero(np.diff(numbers[order])))
    return sorted((group for group in groups if len(group) > 1), key=lambda group: int(group[0]))


def _alike(one: Records, other: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pairs of an image of `one` and an image of `other` that look alike and are not equal: the place of each."""
    near = _signs(one["look"]) @ _signs(other["look"]).T >= 64 - 2 * DISTANCE
    rows, columns = np.flatnonzero(near.any(1)), np.flatnonzero(near.any(0))
    one, other = one[rows], other[columns]
    thumbnails, others = one["thumbnail"].astype(np.float32), other["thumbnail"].astype(np.float32)
    lengths = np.sqrt(np.outer(np.square(thumbnails).sum(1), np.square(others).sum(1)))
    small, others_small = (np.minimum(part["height"], part["width"]) < SMALL for part in (one, other))
    limit = np.where(small[:, None] | others_small, ALIKE_SMALL, ALIKE)
    alike = near[np.ix_(rows, columns)] & (thumbnails @ others.T >= limit * lengths)
    alike &= (one["pixels"][:, None] != other["pixels"]).any(2)
    left, right = np.nonzero(alike)
    return rows[left], columns[right]


def _signs(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """float32 [n, 64]: 1 and -1 for the bits of each hash. The product of two is 64 less twice the bits that differ."""
    return 2 * np.unpackbits(hashes[:, None].view(np.uint8), axis=1).astype(np.float32) - 1


def _joined(members: npt.NDArray[np.int64], pairs: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The groups after all pairs are joined."""
    if not pairs:
        return members
    left, right = members[np.concatenate(pairs, axis=1)]
    count = len(members)
    graph = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(count, count))
    joined: npt.NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return joined[members]


# What was found


def _findings(splits: Splits, images: Images, records: Records, unreadable: Sequence[Unreadable]) -> Iterator[Finding]:
    if unreadable:
        advice = "Replace them, or leave them out with the list: --data.skip-unreadable."
        ids = tuple((each.id,) for each in unreadable)
        yield Finding("unreadable", f"{counted(len(ids), 'image')} cannot be read", advice, ids)
    if splits.missing:
        advice = "Copy the files, or remove the rows: the table cannot be trained on."
        title = f"{counted(len(splits.missing), 'row')} of the table without a file"
        yield Finding("missing", title, advice, names=splits.missing)
    for split, counts in images.counts.items():
        empty = tuple(name for name, count in zip(images.classes, counts, strict=True) if not count)
        if empty:
            title = f"{counted(len(empty), 'class')} without an image in {split}: {first_of(empty)}"
            advice = "Nothing can be learned of a class without training images: add some, or remove the class."
            if split != "train":
                advice = f"Nothing is known of how well the model does on them: add images to {split}."
            yield Finding(f"no-images-{split}", title, advice, names=empty)
    number, label = images.split_numbers, images.label_numbers
    equal = equal_images(records)
    leak = "Keep each in one split only: else the model is tested on images that it was trained on."
    yield from _groups(
        "equal-labels",
        [group for group in equal if len(set(label[group])) > 1],
        "equal images with different labels",
        "One of the labels must be wrong. Correct it, or remove the image.",
    )
    in_splits = [group for group in equal if len(set(number[group])) > 1]
    yield from _groups("equal-splits", in_splits, "equal images in different splits", leak)
    alike = similar_images(records, number, float(splits.full_scale))
    yield from _groups("similar-splits", alike, "images in different splits that look alike", leak)


def _groups(kind: str, groups: Groups, what: str, advice: str) -> Iterator[Finding]:
    if groups:
        title = f"{sum(map(len, groups)):,} {what}, in {counted(len(groups), 'group')}"
        yield Finding(kind, title, advice, tuple(tuple(map(int, group)) for group in groups))


def summary(result: AuditResult) -> Iterator[str]:
    """Yield the lines that the command prints."""
    images, counts = result.images, result.images.counts
    parts = ", ".join(f"{len(source):,} {split}" for split, source in images.sources.items())
    yield f"{counted(len(images), 'image')} ({parts}) of {counted(len(images.classes), 'class')}"
    if len(images.classes) <= CLASSES_SHOWN:
        width = max(map(len, images.classes), default=0)
        for number, name in enumerate(images.classes):
            yield f"  {name:<{width}}  " + ", ".join(f"{each[number]:,} {split}" for split, each in counts.items())
    for mistake in result.mistakes:
        yield f"error: {mistake}"
    for note in result.notes:
        yield f"warning: {note}"
    for finding in result.findings:
        yield f"- {finding.title}. {finding.advice}"
        yield from (f"    {text}" for text in _examples(result, finding))
    if not result.findings and not result.mistakes:
        yield "Nothing was found that blocks or spoils a training."
    if not result.unreadable:
        yield f"All {len(images):,} images can be read." if len(images) > 1 else "The image can be read."
    elif result.unreadable_list is not None:
        some = f"{len(result.unreadable):,} of {counted(len(images), 'image')} cannot be read"
        yield f"{some}; {result.unreadable_list} is the list. To leave them out:"
        options = ["--data.name", result.name, "--data.root", str(result.root)]
        options += ["--data.skip-unreadable", str(result.unreadable_list)]
        yield f"  accel-train train RECIPE {shlex.join(options)}"
    yield f"audit: {result.json}"


def _examples(result: AuditResult, finding: Finding) -> Iterator[str]:
    """The first images of a finding, one line each, or one a group."""
    if finding.kind == "missing":
        yield first_of(finding.names, UNREADABLE_SHOWN)
    describe = result.images.describe
    if finding.kind == "unreadable":
        why = {each.id: each.why for each in result.unreadable}
        most, lines = UNREADABLE_SHOWN, sorted(f"{describe(id)['name']}: {why[id]}" for (id,) in finding.groups)
    else:
        sign = " ~ " if finding.kind.startswith("similar") else " = "
        most, lines = GROUPS_SHOWN, [_group_text(result.images, group, sign) for group in finding.groups]
    yield from lines[:most]
    if len(lines) > most:
        yield f"… and {len(lines) - most:,} more."


def _group_text(images: Images, group: Sequence[int], sign: str) -> str:
    """The first images of a group, with split and label, and how many more there are."""
    text = sign.join("{name} ({split}, {label})".format(**images.describe(id)) for id in group[:IMAGES_SHOWN])
    return text if len(group) <= IMAGES_SHOWN else f"{text} and {len(group) - IMAGES_SHOWN:,} more"
