"""The data: does every process see the same, and can its images be read?"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from accel_train.config.schema import Data
from accel_train.data.sources.files.encoded import depth_notes, read_image
from accel_train.data.sources.load import Splits
from accel_train.data.sources.splits import Source
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN, Check, Examination, Finding, judged, on_each_rank
from accel_train.errors import UserError
from accel_train.files import file_system
from accel_train.run.start import load_data

SLOW_FILE = 0.01  # seconds
NAMES, READ, READ_QUICKLY = 1_000_000, 64, 8  # samples whose names and sizes are compared, and that are decoded


def data(exam: Examination) -> Finding:
    """The data loads, and all ranks have the same configuration, samples and classes."""
    expected = "the same samples and classes on all ranks"
    if exam.quick and max(exam.gather(_lacks(exam.config.data))):
        found = "not all nodes have a copy of the files of data.root yet, which --quick does not make"
        return Finding(NOT_CHECKED, found, expected, "Make it: accel-train check-data, or the training does")
    try:
        exam.splits = load_data(exam.config, exam.accelerator)
    except UserError as error:
        return Finding(FAIL, str(error), expected, "Fix this first: the training cannot start.")
    sizes = {"training": exam.splits.train, "validation": exam.splits.validation, "test": exam.splits.test}
    found = ", ".join(f"{len(source):,} {name}" for name, source in sizes.items() if source is not None)
    return Finding(PASS, f"{found} images of {len(exam.splits.classes)} classes", expected)


def _lacks(data: Data) -> bool:
    """Whether this node has no copy of files that are copied to it before a training."""
    if not data.is_staged:
        return False
    from accel_train.data.sources.staging import folder_for, kept

    try:
        return kept(folder_for(data)) is None
    except UserError:  # which loading the data says
        return False


def contents(exam: Examination) -> Finding:
    """The names, the sizes and some bytes of the data are the same on all ranks."""
    splits = exam.splits
    if splits is None:
        return Finding(NOT_CHECKED, "the data could not be loaded")
    ids = _spread(splits.train, READ_QUICKLY if exam.quick else READ)
    names, sizes = _names_and_sizes(splits.train, exam.config.data.root)
    everyone = exam.gather({"names": names, "sizes": sizes, "images": _images(splits, ids)})
    expected = "equal on all ranks: a node with older files trains something else"
    differing: dict[str, list[int]] = {}
    for what in everyone[0]:
        if other := [rank for rank, each in enumerate(everyone) if each[what] != everyone[0][what]]:
            differing[what] = other
    if not differing:
        return Finding(PASS, f"names and sizes, and the pixels of {len(ids)} images", expected)
    ranks = sorted(set().union(*differing.values()))
    measured = f"the {' and '.join(differing)} of {exam.names(ranks)} differ from rank 0's"
    if other := differing.get("images", []):
        pairs = zip(ids, everyone[0]["images"], everyone[other[0]]["images"], strict=False)
        first = next((id for id, one, another in pairs if one != another), None)
        measured += "" if first is None else f", for example {splits.train.name(first)}"
    return Finding(FAIL, measured, expected, f"Compare {exam.config.data.root} on these nodes; copy it anew.")


def _spread(source: Source, count: int) -> range:
    """About `count` numbers of its samples, evenly spaced."""
    return range(0, len(source), max(1, len(source) // count))


def _names_and_sizes(source: Source, root: Path) -> tuple[str, str]:
    """Digests of the samples' names below `root` and, if they are files, of the sizes of up to 1,000 of them."""
    names, sizes, every = hashlib.sha256(), hashlib.sha256(), max(1, len(source) // 1000)
    for id in range(min(len(source), NAMES)):
        name = source.name(id)
        names.update(name.removeprefix(f"{root}/").encode(errors="surrogateescape") + b"\0")
        if id % every == 0 and os.path.isfile(name):  # noqa: PTH113 -- a path object for each takes twice the time
            sizes.update(f"{Path(name).stat().st_size} ".encode())
    return names.hexdigest(), sizes.hexdigest()


def _images(splits: Splits, ids: Sequence[int]) -> list[str]:
    """A digest of the pixels of each of these training images; why it cannot be read, if so."""
    digests = []
    for id in ids:
        try:
            pixels = b""
            if splits.unreadable is None or not splits.unreadable[id]:
                pixels = splits.train.fetch([id])[0].contiguous().numpy().tobytes()
            digests.append(hashlib.sha256(pixels).hexdigest()[:16])
        except UserError as error:
            digests.append(str(error))
    return digests


@on_each_rank
def readable(exam: Examination) -> Finding:
    """Images that are chosen at random, others on each rank, can be decoded."""
    splits, count = exam.splits, READ_QUICKLY if exam.quick else READ
    if splits is None:
        return Finding(NOT_CHECKED, "the data could not be loaded")
    if splits.train.in_memory:
        return Finding(NOT_CHECKED, "the data is in memory: nothing is decoded")
    source = splits.to_train_on
    draw = torch.Generator().manual_seed(exam.launch.rank)
    ids = torch.randint(len(source), (count,), generator=draw).tolist()
    expected = f"{count} random images of each rank can be read"
    try:
        for id in ids:
            source.fetch([id])
    except UserError as error:
        advice = "Find all of them: accel-train check-data; then --data.skip-unreadable FILE"
        return Finding(FAIL, str(error), expected, advice)
    if dark := depth_notes(source):
        return Finding(WARN, dark[0], "pictures that use the range of their values", "See --data.range")
    return Finding(PASS, f"{len(ids)} on each rank", expected)


@on_each_rank
def reading(exam: Examination) -> Finding:
    """How long this file system takes to hand out a file of the data, others on each rank."""
    splits = exam.splits
    if splits is None or splits.train.in_memory or exam.config.data.is_staged:
        return Finding(NOT_CHECKED, "no image files")
    draw = torch.Generator().manual_seed(1000 + exam.launch.rank)
    ids = torch.randint(len(splits.train), (READ_QUICKLY if exam.quick else READ,), generator=draw).tolist()
    seconds = []
    for id in ids:
        began = time.perf_counter()
        read_image(Path(splits.train.name(id)), exam.config.data.max_pixels)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    found = f"{median * 1000:.2g} ms a file (median of {len(ids)}), {file_system(exam.config.data.root)}"
    expected = f"less than {SLOW_FILE * 1000:.0f} ms, or enough data workers"
    advice = "Copy the data to the node's disk, as one archive; or decode once: accel-train shards --encoding raw"
    return judged(median <= SLOW_FILE, found, expected, advice)


CHECKS = (
    Check("data", data, quick=True, seconds=5),
    Check("data-contents", contents, quick=True, seconds=5),
    Check("images", readable, quick=True, seconds=3),
    Check("reading", reading, quick=True, seconds=3),
)
