"""The disks: is the data the same on all nodes, can it be read fast, and is there room for what a run writes?"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from accel_train.data.sources.splits import Source
from accel_train.errors import UserError
from accel_train.files import file_system
from accel_train.launch.agreement import broadcast_from_main
from accel_train.run.start import load_data
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN, Examination, Finding, judged, on_each_rank, worst_rank

SLOW_FILE = 0.01  # seconds
FILES, COMPARED, READ = 1000, 8, 64  # samples whose sizes, pixels and times are compared
READ_SECONDS, SAVE_SECONDS = 0.5, 1.0  # the longest time of a measurement
INODES = 1000  # files of a run with its checkpoints, generously
ASKED, ASKED_SECONDS = 16 * 2**20, 0.02  # bytes that a disk which can reserve room reserves in no time
SCRATCH_BYTES = 16 * 2**20  # in HOME, TMPDIR and the caches
CACHES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def data_contents(exam: Examination) -> Finding:
    """The data loads; its names, its sizes and some pixels are the same on all ranks."""
    expected = "equal on all ranks: a node with older files trains something else"
    if exam.splits is None:
        try:
            exam.splits = load_data(exam.config, exam.accelerator)
        except UserError as error:
            return Finding(FAIL, str(error), expected, "Fix this first: the training cannot start.")
    train, unreadable = exam.splits.train, exam.splits.unreadable
    ids = range(0, len(train), max(1, len(train) // COMPARED))
    everyone = exam.gather((_names_and_sizes(train), *(_pixels(train, unreadable, id) for id in ids)))
    others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if not others:
        return Finding(PASS, f"{len(train):,} training images of {len(exam.splits.classes)} classes", expected)
    first = next(number for number, theirs in enumerate(everyone[others[0]]) if theirs != everyone[0][number])
    what = f"the pixels of {train.name(ids[first - 1])}" if first else "the names or sizes of the files"
    measured = f"{what} on {exam.names(others)} are not those on rank 0"
    return Finding(FAIL, measured, expected, f"Compare {exam.config.data.root} on these nodes; copy it anew.")


def _names_and_sizes(source: Source) -> str:
    """A digest of the names and sizes of up to 1,000 samples that are files."""
    digest = hashlib.sha256()
    for id in range(0, len(source), max(1, len(source) // FILES)):
        if (file := Path(source.name(id))).is_file():
            digest.update(f"{file.name} {file.stat().st_size} ".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _pixels(source: Source, unreadable: torch.Tensor | None, id: int) -> str:
    """A digest of the pixels of an image; why it cannot be read, if so."""
    if unreadable is not None and unreadable[id]:
        return ""
    try:
        return hashlib.sha256(source.fetch([id])[0].contiguous().numpy().tobytes()).hexdigest()
    except (UserError, OSError) as error:
        return str(error)


@on_each_rank
def reading(exam: Examination) -> Finding:
    """Random images, others on each rank, can be read and decoded, and how long that takes."""
    if exam.splits is None:
        return Finding(NA, "the data could not be loaded")
    if exam.splits.train.in_memory:
        return Finding(NA, "the data is in memory: nothing is read")
    source, draw, seconds = exam.splits.to_train_on, random.Random(exam.launch.rank), list[float]()
    try:
        while len(seconds) < READ and sum(seconds) < READ_SECONDS:
            began = time.perf_counter()
            source.fetch([draw.randrange(len(source))])
            seconds.append(time.perf_counter() - began)
    except UserError as error:
        advice = "Find all of them: accel-train check-data; then --data.skip-unreadable FILE"
        return Finding(FAIL, str(error), "images that can be read", advice)
    median = statistics.median(seconds)
    found = f"{median * 1000:.2g} ms an image (median of {len(seconds)}), {file_system(exam.config.data.root)}"
    advice = "Copy the data to the node's disk, as one archive; or decode once: accel-train shards --encoding raw"
    return judged(median <= SLOW_FILE, found, f"less than {SLOW_FILE * 1000:.0f} ms, or enough workers", advice)


def room(exam: Examination) -> Finding:
    """The run's disk has room for the checkpoints, and HOME, TMPDIR and the caches of each node can be written."""
    size = None if exam.setup is None else checkpoint_bytes(exam)
    checkpoints = broadcast_from_main(exam.accelerator, lambda: _room(exam, size))
    scratch = worst_rank(exam, _scratch)
    return scratch if scratch.status == WARN and checkpoints.status in (PASS, NA) else checkpoints


def checkpoint_bytes(exam: Examination) -> int:
    """The size of a checkpoint: the weights, their EMA, and the one or two copies that the optimizer keeps."""
    assert exam.setup is not None
    weights: int = sum(value.numel() * value.element_size() for value in exam.setup.bare_model.state_dict().values())
    copies = 1 if exam.config.optim.name in ("sgd", "momentum", "lion", "muon") else 2  # of Adam and its relatives
    return weights * (1 + copies + exam.config.ema.enabled)


def _room(exam: Examination, size: int | None) -> Finding:
    keep = exam.config.checkpoint.keep + 2
    expected = "" if size is None else f"{keep} checkpoints of {size / 2**20:,.1f} MiB"
    try:
        usage, inodes = shutil.disk_usage(exam.folder), os.statvfs(exam.folder)
    except OSError as error:
        return Finding(NA, f"{exam.folder} cannot be examined ({error.strerror})", expected)
    found = f"{usage.free / 2**30:.1f} GiB free in {exam.folder}"
    if inodes.f_files and inodes.f_favail < INODES:
        advice = "Delete files, or choose another disk."
        return Finding(FAIL, f"{exam.folder} has {inodes.f_favail} inodes free", f"{INODES}", advice)
    if size is not None and usage.free < size * keep:
        return Finding(FAIL, found, expected, "Free room, choose another --output-dir, or a smaller --checkpoint.keep.")
    if reason := why_not_writable(exam.folder, (size or 0) * keep):
        advice = "Choose another --output-dir, or look at your quota (quota -s, lfs quota)."
        return Finding(FAIL, f"{found}, but: {reason}", expected, advice)
    return Finding(PASS if size is not None else NA, found, expected)


def _scratch() -> Finding:
    folders = {name: Path(os.environ[name]) for name in ("HOME", *CACHES) if os.environ.get(name)}
    for name, folder in {**folders, "TMPDIR": Path(os.environ.get("TMPDIR", "/tmp"))}.items():
        if name in CACHES:  # is made when it is needed
            folder = next((place for place in (folder, *folder.parents) if place.is_dir()), folder)
        if reason := why_not_writable(folder, SCRATCH_BYTES):
            advice = f"export {name}=a folder on a disk with room, in the job script"
            return Finding(WARN, f"{name} is {folder}: {reason}", "a folder that can be written", advice)
    return Finding(PASS, "")


def why_not_writable(folder: Path, size: int) -> str:
    """Why a file of `size` bytes cannot be written into `folder` by this user, who may have a quota; "" if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if size == 0 or not hasattr(os, "posix_fallocate"):
                return ""
            began = time.perf_counter()
            os.posix_fallocate(file.fileno(), 0, min(size, ASKED))
            if time.perf_counter() - began < ASKED_SECONDS:  # otherwise glibc writes to each block, which takes long
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of a file system that reserves nothing
            return str(error.strerror)
    return ""


def save(exam: Examination) -> Finding:
    """A save of this recipe's size, down to the disk, and its rename."""
    size = 2**20 if exam.setup is None else checkpoint_bytes(exam)
    finding, seconds = broadcast_from_main(exam.accelerator, lambda: _save(exam.folder, size))
    if seconds is not None and exam.setup is not None:  # otherwise it was not a save of this recipe's size
        exam.measured["save_seconds"] = seconds
    return finding


def _save(folder: Path, size: int) -> tuple[Finding, float | None]:
    expected, written = "it can be written, synchronised and renamed", 0
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as place:
            began, block = time.perf_counter(), os.urandom(2**20)
            with Path(place, "new").open("wb") as file:
                while written < size and time.perf_counter() - began < SAVE_SECONDS:
                    written += file.write(block[: size - written])
                    os.fsync(file.fileno())  # so that what is extrapolated has reached the disk
            Path(place, "new").rename(Path(place, "checkpoint"))
            seconds = (time.perf_counter() - began) * size / max(1, written)
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror})"
        return Finding(FAIL, found, expected, "Choose another --output-dir."), None
    return Finding(PASS, f"{size / 2**20:.1f} MiB in {seconds:.2g} s", expected), seconds
