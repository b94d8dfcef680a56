"""What an audit has found, from the records of all images: one `Finding` of each kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from accel_train.audit.duplicates import Groups, equal_images, similar_images
from accel_train.audit.images import Images
from accel_train.audit.look import COLOUR, GREY, Records, Unreadable
from accel_train.audit.unreadable import KINDS
from accel_train.data.sources.splits import Splits
from accel_train.errors import first_of

FEW = 10
"""Training images of a class. With fewer, a tenth of them, as --data.val-fraction 0.1 takes it, may be none."""
NARROW = 16 / 255  # of the largest value: between an image's smallest and its largest value
LONG = 3.0  # an odd ratio of the sides, unless it is usual in the data set
TINY = 0.25  # of the median short side


@dataclass(frozen=True)
class Finding:
    """Something that was found, and what to do about it."""

    kind: str
    title: str
    """What was found, with numbers: "3 images cannot be read"."""
    advice: str
    decide: bool
    """Whether a user must decide what to do. Else it is only worth a look."""
    groups: Sequence[Sequence[int]] = field(default=(), repr=False)
    """The numbers of the images: of each group of equal or similar ones, else of each image alone."""
    notes: Mapping[int, str] = field(default_factory=dict, repr=False)
    """What is to be said of single images."""
    names: tuple[str, ...] = ()
    """Of what is no image: classes, files that are missing."""


def all_findings(splits: Splits, images: Images, records: Records, unreadable: Sequence[Unreadable]) -> list[Finding]:
    """All that was found; first what must be decided on."""
    white = float(splits.full_scale)  # the largest value
    found = [
        *_unreadable(unreadable),
        *_missing(splits.missing),
        *_duplicates(images, records, white),
        *_classes(images),
        *_pixels(records, white),
        *_sizes(records),
        *_ignored(splits.ignored),
    ]
    return sorted(found, key=lambda finding: not finding.decide)


def count_text(count: int, what: str = "image", rest: str = "") -> str:
    """Return "1 image", "3 images"; `rest`: what follows, in the plural ("are empty")."""
    verb, space, others = rest.partition(" ")
    if count == 1:
        rest = {"are": "is", "have": "has"}.get(verb, verb) + space + others
    return f"{count:,} {what}{'' if count == 1 else 'es' if what.endswith('s') else 's'}{' ' * bool(rest)}{rest}"


def _singles(
    kind: str, found: npt.NDArray[np.bool_], rest: str, advice: str, *, decide: bool = False
) -> Iterator[Finding]:
    """`found`: bool [n], of each image."""
    groups = tuple((id,) for id in np.flatnonzero(found).tolist())
    if groups:
        yield Finding(kind, count_text(len(groups), rest=rest), advice, decide, groups)


def _unreadable(unreadable: Sequence[Unreadable]) -> Iterator[Finding]:
    if not unreadable:
        return
    kinds = Counter(KINDS[each.kind] for each in unreadable)
    parts = ", ".join(f"{count:,} {text}" for text, count in sorted(kinds.items()))
    advice = "Replace them, or leave them out with the list: --data.skip-unreadable."
    if packages := {each.package: each.why.removeprefix("it is ") for each in unreadable if each.package}:
        formats = ", ".join(f"{format} (read by {package})" for package, format in sorted(packages.items()))
        advice += f" Convert to JPEG or PNG: {formats}."
    notes = {each.id: f"{KINDS[each.kind]}: {each.why}" for each in unreadable}
    notes |= {each.id: f"{each.why}, read by {each.package}" for each in unreadable if each.package}
    ids = tuple((each.id,) for each in unreadable)
    yield Finding("unreadable", f"{count_text(len(ids))} cannot be read: {parts}", advice, True, ids, notes)


def _missing(missing: tuple[str, ...]) -> Iterator[Finding]:
    if missing:
        advice = "Copy the files, or remove the rows: the table cannot be trained on."
        title = count_text(len(missing), "row", "of the table without a file")
        yield Finding("missing", title, advice, True, names=missing)


def _duplicates(images: Images, records: Records, white: float) -> Iterator[Finding]:
    equal = equal_images(records)
    yield from _of_groups("equal", equal, images)
    # Of equal images the first one stands for all: an image like one of them may be in another split, or class.
    rest = {int(group[0]): group for group in equal}
    alike = [
        np.sort(np.concatenate([rest.get(int(id), np.array([id])) for id in group]))
        for group in similar_images(records, white)
    ]
    yield from _of_groups("similar", alike, images)


def _of_groups(kind: str, groups: Groups, images: Images) -> Iterator[Finding]:
    splits, labels = images.split_numbers, images.label_numbers
    mixed = [group for group in groups if len(set(labels[group].tolist())) > 1]
    leaks = [group for group in groups if len(set(splits[group].tolist())) > 1]
    other = {int(group[0]) for group in (*mixed, *leaks)}
    rest = [group for group in groups if int(group[0]) not in other]
    for name, some, where, advice, decide in (
        ("labels", mixed, "with different labels", "Look at each group, and keep the right label.", True),
        ("splits", leaks, "in different splits", "Keep each in one split only: else the model is tested on images that "
         "it was trained on, and its accuracy is too high.", True),
        ("same", rest, "in one class and split", "They count more than others. Remove the copies, unless "
         "this is intended.", False),
    ):  # fmt: skip
        if some:
            count = sum(map(len, some))
            title = f"{count_text(count, f'{kind} image', where)}, in {count_text(len(some), 'group')}"
            yield Finding(f"{kind}-{name}", title, advice, decide, tuple(tuple(map(int, group)) for group in some))


def _classes(images: Images) -> Iterator[Finding]:
    for split, counts in images.counts.items():
        empty = tuple(name for name, count in zip(images.classes, counts, strict=True) if not count)
        if empty:
            title = f"{count_text(len(empty), 'class', 'have no image')} in {split}: {first_of(empty)}"
            advice = "Nothing can be learned of a class without training images: add some, or remove the class."
            if split != "train":
                advice = f"Nothing is known of how well the model does on them: add images to {split}."
            yield Finding(f"no-images-{split}", title, advice, True, names=empty)
    few = [
        f"{name} ({count})"
        for name, count in zip(images.classes, images.counts.get("train", ()), strict=False)
        if 0 < count < FEW
    ]
    if few:
        title = f"{count_text(len(few), 'class', 'have')} fewer than {FEW} training images: {first_of(few)}"
        advice = "Add images. A fraction of them for validation or test (--data.val-fraction) may be none."
        yield Finding("few-images", title, advice, False, names=tuple(few))


def _pixels(records: Records, white: float) -> Iterator[Finding]:
    readable = records["readable"] == 1
    undefined = readable & np.isnan(records["low"])
    constant = readable & (records["constant"] == 1)
    advice = "Look at how they were made: these values reach the model as they are."
    yield from _singles("not-finite", undefined, "have values that are NaN or infinite", advice, decide=True)
    advice = "Nothing can be seen in them: remove them, unless the empty image is what is to be learned."
    yield from _singles("constant", constant, "have one colour only", advice, decide=True)
    with np.errstate(invalid="ignore"):
        narrow = readable & ~constant & (records["high"] - records["low"] < NARROW * white)
    advice = "They are nearly empty, or darker than they should be: images of 16 bits may need --data.range."
    yield from _singles("narrow", narrow, "have next to no contrast", advice)
    turned = readable & (records["orientation"] > 1)
    advice = "This program shows them upright, as they are meant. Others may not: bounding boxes, earlier predictions."
    yield from _singles("rotated", turned, "are rotated by EXIF", advice)
    grey, colour = (readable & ~constant & ~narrow & (records["colours"] == kind) for kind in (GREY, COLOUR))
    if grey.any() and colour.any():
        if grey.sum() <= colour.sum():
            advice = (
                "If some classes have more of them, the model learns that. --data.channels 1 trains without colours."
            )
            yield from _singles("grey", grey, "are grey, and most are in colour", advice)
        else:
            advice = "Look whether they belong to the data set. --data.channels 1 trains without colours."
            yield from _singles("colour", colour, "are in colour, and most are grey", advice)


def _sizes(records: Records) -> Iterator[Finding]:
    readable = records["readable"] == 1
    if not readable.any():
        return
    height, width = (records[side].astype(np.float64).clip(1) for side in ("height", "width"))
    ratio, short = np.maximum(height, width) / np.minimum(height, width), np.minimum(height, width)
    usual = float(np.median(ratio[readable]))
    long = readable & (ratio > max(LONG, 2 * usual))
    advice = "A square crop shows a small part of them: cut them up, or look whether they belong to the data set."
    rest = f"have a long side of more than {max(LONG, 2 * usual):.2g} times the short one"
    yield from _singles("long", long, rest, advice)
    median = float(np.median(short[readable]))
    tiny = readable & (short < TINY * median)
    rest = f"have a short side below {TINY * median:.0f} pixels, a quarter of the usual one"
    advice = "They are enlarged for the model: are they thumbnails of the images that were meant?"
    yield from _singles("small", tiny, rest, advice)


def _ignored(ignored: str) -> Iterator[Finding]:
    if ignored:
        advice = "Look whether images are among them: HEIC, JPEG XL and raw files must be converted to JPEG or PNG."
        yield Finding("not-used", f"Not used: {ignored}", advice, False)
