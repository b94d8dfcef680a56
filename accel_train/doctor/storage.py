"""The disks: is there room, and how long does a save take?"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from accel_train import models
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN, Check, Examination, Finding, judged, on_each_rank
from accel_train.doctor.network import has_infiniband
from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main, check_shared_directory
from accel_train.user_code.reference import parse_reference

# https://github.com/stas00/ml-engineering, storage: a disk that is more than 80 % full is slow, and soon full.
UNSEEN_SECONDS = 5.0  # a network file system may show a new file late
FULL, SHM_BYTES, IMPORT_SECONDS, FILES = 0.8, 2**30, 10.0, 1024
MOST_WRITTEN, MOST_WRITTEN_QUICKLY = 2**30, 2**27  # bytes of a trial save; a larger one is extrapolated
ASKED, ASKED_SECONDS = 16 * 2**20, 0.02  # bytes that a disk which can reserve room reserves in no time
INODES = 1000  # files of a run with its checkpoints, generously


def shared_folder(exam: Examination) -> Finding:
    """All nodes see the folder of the run."""
    expected = "what rank 0 writes is seen on all nodes"
    if exam.launch.world_size == 1:
        return Finding(NOT_CHECKED, "a single process", expected)
    try:
        check_shared_directory(exam.accelerator, exam.folder, UNSEEN_SECONDS)
    except UserError as error:
        return Finding(FAIL, str(error), expected, "Choose an --output-dir on a file system that all nodes share.")
    return Finding(PASS, f"{exam.folder}", expected)


def room(exam: Examination) -> Finding:
    """The disk has room for the checkpoints."""
    _estimate_checkpoint(exam)
    return broadcast_from_main(exam.accelerator, lambda: _room(exam))


def _estimate_checkpoint(exam: Examination) -> None:
    """Estimate the size of a checkpoint, if no update was measured: from the model, made without memory, and from what
    the optimizer and the EMA keep. Collective."""
    if "checkpoint_bytes" in exam.measured or exam.splits is None:
        return
    splits = exam.splits

    def size() -> float | None:
        config = exam.config
        if parse_reference("model.name", config.model.name):  # it may need real numbers, and take any time
            return None
        try:
            with torch.device("meta"):
                pixels = models.input_size(config.model, splits.image_size, config.origin)
                model = models.create_model(
                    config.model, num_classes=len(splits.classes), channels=splits.channels, image_size=pixels,
                    published=False, origin=config.origin,
                )  # fmt: skip
        except (UserError, RuntimeError, NotImplementedError):  # the training will say it
            return None
        weights = sum(tensor.nbytes for tensor in model.state_dict().values())
        copies = 1 if config.optim.name in ("sgd", "momentum", "lion", "muon") else 2  # of Adam and its relatives
        return float(weights * (1 + copies + config.ema.enabled))

    estimated = broadcast_from_main(exam.accelerator, size)
    if estimated is not None:
        exam.measured["checkpoint_bytes"] = estimated


def _room(exam: Examination) -> Finding:
    usage, keep = shutil.disk_usage(exam.folder), exam.config.checkpoint.keep + 2
    # As df: what is kept for root is neither used nor free.
    used, size = usage.used / (usage.used + usage.free), exam.measured.get("checkpoint_bytes")
    found = f"{usage.free / 2**30:.1f} GiB free in {exam.folder}, {used:.0%} full"
    inodes = os.statvfs(exam.folder)
    if inodes.f_files and inodes.f_favail < INODES:
        return Finding(FAIL, f"{inodes.f_favail} inodes free", f"{INODES}", "Delete files, or choose another disk.")
    expected = "" if size is None else f"{keep} checkpoints of {size / 2**20:,.1f} MiB"
    if size is not None and usage.free < size * keep:
        return Finding(FAIL, found, expected, "Free room, choose another --output-dir, or a smaller --checkpoint.keep.")
    if size is not None and (reason := _refused(exam.folder, int(size * keep))):
        return Finding(FAIL, f"{found}, but: {reason}", expected, "Look at your quota (quota -s, lfs quota).")
    if used > FULL:
        return Finding(WARN, found, expected or "less than 80 % full", "Free room: others will write there, too.")
    return Finding(PASS if size is not None else NOT_CHECKED, found, expected)


def _refused(folder: Path, size: int) -> str:
    """Why the disk does not give `size` bytes to this user, who may have a quota; "" if it does, or cannot be asked."""
    if not hasattr(os, "posix_fallocate"):
        return ""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            began = time.perf_counter()
            os.posix_fallocate(file.fileno(), 0, min(size, ASKED))
            if time.perf_counter() - began < ASKED_SECONDS:  # otherwise glibc writes to each block, which takes long
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            return str(error.strerror) if error.errno in (errno.EDQUOT, errno.ENOSPC, errno.EFBIG) else ""
    return ""


@on_each_rank
def staging(exam: Examination) -> Finding:
    """The storage of data that is copied to each node answers, and the node has room for it."""
    if not exam.config.data.is_staged:
        return Finding(NOT_CHECKED, "the data is read where it is")
    if exam.launch.local_rank != 0:  # one of each node
        return Finding(PASS, "")
    from accel_train.data.sources.staging import look

    expected = "an answer of the storage, and room for the copy"
    try:
        return Finding(PASS, look(exam.config.data), expected)
    except UserError as error:
        return Finding(FAIL, str(error), expected, "Give --data.stage, or see docs/large_data.md.")


def save(exam: Examination) -> Finding:
    """A save of this recipe's size, down to the disk, and its rename."""
    finding, seconds = broadcast_from_main(exam.accelerator, lambda: _save(exam))
    if seconds is not None and "checkpoint_bytes" in exam.measured:  # otherwise it was not a save of this recipe's size
        exam.measured["save_seconds"] = seconds
    return finding


def _save(exam: Examination) -> tuple[Finding, float | None]:
    size = int(exam.measured.get("checkpoint_bytes", 2**20))
    expected = "it can be written, synchronised and renamed"
    written = min(size, MOST_WRITTEN_QUICKLY if exam.quick else MOST_WRITTEN)
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=exam.folder) as place:
            began, block = time.perf_counter(), os.urandom(2**20)
            with Path(place, "new").open("wb") as file:
                for start in range(0, written, len(block)):
                    file.write(block[: written - start])
                file.flush()
                os.fsync(file.fileno())
            Path(place, "new").rename(Path(place, "checkpoint"))
            seconds = (time.perf_counter() - began) * size / max(1, written)
    except OSError as error:
        advice = "Choose another --output-dir."
        return Finding(FAIL, f"{exam.folder} cannot be written ({error.strerror})", expected, advice), None
    return Finding(PASS, f"{size / 2**20:.1f} MiB in {seconds:.2g} s", expected), seconds


@on_each_rank
def shared_memory(_: Examination) -> Finding:
    """/dev/shm, through which data workers pass their batches."""
    if not Path("/dev/shm").is_dir():
        return Finding(NOT_CHECKED, "there is no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    found, expected = f"{free / 2**30:.1f} GiB free", "1 GiB: data workers pass their batches through it"
    return judged(free >= SHM_BYTES, found, expected, "In a container: --shm-size=8g, or --ipc=host.")


@on_each_rank
def open_files(_: Examination) -> Finding:
    """How many files a process may open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = limit == resource.RLIM_INFINITY or limit >= FILES
    return judged(enough, f"{limit}", f"{FILES}", "ulimit -n 4096 in the job script")


@on_each_rank
def locked_memory(_: Examination) -> Finding:
    """How much memory a process may lock: InfiniBand needs it."""
    if not has_infiniband():
        return Finding(NOT_CHECKED, "there is no InfiniBand")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{limit / 2**10:,.0f} KiB"
    return judged(unlimited, found, "unlimited", "Ask the administrators for LimitMEMLOCK=infinity of Slurm's daemon.")


@on_each_rank
def import_time(exam: Examination) -> Finding:
    """How long a new process takes to import torch: each start and each data worker waits for it."""
    began = time.perf_counter()
    if exam.launch.local_rank == 0:  # one of each node
        subprocess.run([sys.executable, "-c", "import torch"], check=False, capture_output=True, timeout=120)
    seconds = time.perf_counter() - began
    found, expected = f"{seconds:.1f} s", f"less than {IMPORT_SECONDS:.0f} s"
    advice = "Keep the environment on a local disk, or in a container image."
    return judged(seconds <= IMPORT_SECONDS, found, expected, advice)


CHECKS = (
    Check("room", room, quick=True),
    Check("staging", staging, quick=True, seconds=5),
    Check("save", save, quick=True, seconds=3),
    Check("shared-memory", shared_memory, quick=True),
    Check("open-files", open_files, quick=True),
    Check("locked-memory", locked_memory, quick=True),
    Check("import", import_time, seconds=8),
    Check("shared-folder", shared_folder, quick=True, seconds=5),
)
