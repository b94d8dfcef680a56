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

from accel_train.data.sources.splits import Source
from accel_train.errors import UserError, reason_of
from accel_train.run.start import load_data
from accel_train.tools.doctor import check
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN, Examination, Finding, judged, on_each_rank, on_main

SLOW_FILE = 0.01  # seconds
FILES, COMPARED, READ = 1000, 8, 64  # samples whose sizes, pixels and times are compared
READ_SECONDS, SAVE_SECONDS = 0.5, 1.0  # the longest time of a measurement
INODES = 1000  # files of a run with its checkpoints, generously
ASKED, ASKED_SECONDS = 16 * 2**20, 0.02  # bytes that a disk which can reserve room reserves in no time
SCRATCH_BYTES = 16 * 2**20  # in HOME, TMPDIR and the caches
CACHES = ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def data_contents(exam: Examination) -> Finding:
    """The data loads; its names, its sizes and some pixels are the same on all ranks."""
    exam.splits = exam.splits or load_data(exam.config, exam.accelerator)
    train = exam.splits.train
    found = check.same(exam, _digests(train), f"Compare {exam.config.data.root} on these nodes; copy it anew.")
    size = f"{len(train):,} training images of {len(exam.splits.classes)} classes"
    return Finding(PASS, size, found.expected) if found.status == PASS else found


def _digests(source: Source) -> dict[str, str]:
    """Of the names and sizes of up to 1,000 samples that are files, and of the pixels of some images: why one cannot be
    read, if so."""
    names = hashlib.sha256()
    for id in range(0, len(source), max(1, len(source) // FILES)):
        if (file := Path(source.name(id))).is_file():
            names.update(f"{file.name} {file.stat().st_size} ".encode(errors="surrogateescape"))
    digests = {"the names and sizes of the files": names.hexdigest()[:8]}
    for id in range(0, len(source), max(1, len(source) // COMPARED)):
        try:
            pixels = hashlib.sha256(source.fetch([id])[0].contiguous().numpy().tobytes()).hexdigest()[:8]
        except (UserError, OSError) as error:
            pixels = reason_of(error)
        digests[f"the pixels of image {id} ({Path(source.name(id)).name})"] = pixels
    return digests


@on_each_rank
def reading(exam: Examination) -> Finding:
    """Random images, others on each rank, can be read and decoded, and how long that takes."""
    if exam.splits is None or exam.splits.train.in_memory:
        return Finding(NA, "the data is in memory, or could not be loaded")
    source, draw, seconds = exam.splits.to_train_on, random.Random(exam.launch.rank), list[float]()
    while len(seconds) < READ and sum(seconds) < READ_SECONDS:
        began = time.perf_counter()
        source.fetch([draw.randrange(len(source))])
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    found = f"{median * 1000:.2g} ms an image (median of {len(seconds)})"
    advice = "Copy the data to the node's disk, as one archive; or decode once: accel-train shards --encoding raw"
    return judged(median <= SLOW_FILE, found, f"less than {SLOW_FILE * 1000:.0f} ms, or enough workers", advice)


def room(exam: Examination) -> Finding:
    """The run's disk has room for the checkpoints, and HOME, TMPDIR and the caches of each node can be written."""
    return check.worst(_room(exam), _scratch(exam))


def checkpoint_bytes(exam: Examination) -> int:
    """The size of a checkpoint: the weights, their EMA, and the one or two copies that the optimizer keeps; 0 without a
    model."""
    if exam.setup is None:
        return 0
    weights: int = sum(value.numel() * value.element_size() for value in exam.setup.bare_model.state_dict().values())
    copies = 1 if exam.config.optim.name in ("sgd", "momentum", "lion", "muon") else 2  # of Adam and its relatives
    return weights * (1 + copies + exam.config.ema.enabled)


@on_main
def _room(exam: Examination) -> Finding:
    size, keep = checkpoint_bytes(exam), exam.config.checkpoint.keep + 2
    expected = f"{INODES} files" + (f" and {keep} checkpoints of {size / 2**20:,.1f} MiB" if size else "")
    free, inodes = shutil.disk_usage(exam.folder).free, os.statvfs(exam.folder)
    found = f"{free / 2**30:.1f} GiB free in {exam.folder}"
    reason = why_not_writable(exam.folder, size * keep)
    if inodes.f_files and inodes.f_favail < INODES:
        reason = f"{inodes.f_favail} inodes free"
    if reason or free < size * keep:
        advice = "Delete files, choose another --output-dir, or a smaller --checkpoint.keep; see your quota (quota -s)."
        return Finding(FAIL, f"{found}; {reason or 'too little'}", expected, advice)
    return Finding(PASS if size else NA, found, expected)


@on_each_rank
def _scratch(_: Examination) -> Finding:
    folders = {name: Path(os.environ[name]) for name in ("HOME", *CACHES) if os.environ.get(name)}
    for name, folder in {**folders, "TMPDIR": Path(os.environ.get("TMPDIR", "/tmp"))}.items():
        if name in CACHES:  # is made when it is needed
            folder = next((place for place in (folder, *folder.parents) if place.is_dir()), folder)
        if reason := why_not_writable(folder, SCRATCH_BYTES):
            advice = f"export {name}=a folder on a disk with room, in the job script"
            return Finding(WARN, f"{name} is {folder}: {reason}", "a folder that can be written", advice)
    return Finding(NA, "")


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


@on_main
def save(exam: Examination) -> Finding:
    """A save of this recipe's size, down to the disk, and its rename."""
    size = checkpoint_bytes(exam) or 2**20
    expected, written = "it can be written, synchronised and renamed", 0
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=exam.folder) as place:
            began, block = time.perf_counter(), os.urandom(2**20)
            with Path(place, "new").open("wb") as file:
                while written < size and time.perf_counter() - began < SAVE_SECONDS:
                    written += file.write(block[: size - written])
                    os.fsync(file.fileno())  # so that what is extrapolated has reached the disk
            Path(place, "new").rename(Path(place, "checkpoint"))
            seconds = (time.perf_counter() - began) * size / max(1, written)
    except OSError as error:
        reason = f"{exam.folder} cannot be written ({error.strerror})"
        return Finding(FAIL, reason, expected, "Choose another --output-dir.")
    if exam.setup is not None:  # otherwise it was not a save of this recipe's size
        exam.measured["save_seconds"] = seconds
    return Finding(PASS, f"{size / 2**20:.1f} MiB in {seconds:.2g} s", expected)
