"""All processes act alike: one decides for all, all end if one must, and they agree on what they do.

What only the main process can know (a clock, a disk) is sent to the others. What every process finds on its own (its
copy of the data) may be wrong on one of them.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from accel_train.errors import UserError, reason_of
from accel_train.files import open_to_write
from accel_train.launch.process import hostname, ranges

T = TypeVar("T")


def broadcast_from_main(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """Call `decide` on the main process, and return its result on every process. Collective.

    A UserError that it raises is raised on every process.
    """
    outcome: list[T | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [decide()]
        except UserError as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


@contextmanager
def naming_a_loss() -> Iterator[None]:
    """Turn a collective's error into a UserError, where no watchdog does: another process was killed, or has failed."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        raise UserError(
            f"{hostname()} has lost another process, which was killed or has failed (see its message): "
            f"{reason_of(error, 200)}. Start all processes again.",
            every_process=False,
        ) from error


def fail_together(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """Call `work`, which may not be collective, on every process, and return its result. Collective.

    If it raises a UserError on some processes, such as those of a node with other files, every process raises one.
    """
    result, error = None, None
    try:
        result = work()
    except UserError as problem:
        error = problem
    found = gather_object([None if error is None else error.messages])
    failed = [rank for rank, messages in enumerate(found) if messages is not None]
    if failed and len(failed) < len(found):
        first, *others = found[failed[0]]
        raise UserError(f"On rank {failed[0]}, but not on all: {first}", *others) from error
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def check_agreement(accelerator: Accelerator, **facts: str) -> None:
    """Check that a fact (configuration, a version, the data's length, the classes) is the same on all processes.

    Collective: every process must call it with the same names. Raises UserError that names the facts, ranks and hosts.
    """

    def short(fact: str) -> str:
        return fact if len(fact) <= 40 else f"{len(fact)} characters with CRC {zlib.crc32(fact.encode()):08x}"

    if accelerator.num_processes == 1:
        return
    everyone = gather_object([(hostname(), {name: short(fact) for name, fact in facts.items()})])
    first_host, first = everyone[0]
    differences = []
    for name, expected in first.items():
        others = defaultdict(list)
        for rank, (host, its_facts) in enumerate(everyone):
            if its_facts[name] != expected:
                others[host, its_facts[name]].append(rank)
        differences += [
            f"{name} is {value!r} on ranks {ranges(ranks)} ({host}), {expected!r} on rank 0 ({first_host})"
            for (host, value), ranks in others.items()
        ]
    if differences:
        raise UserError(
            f"The processes do not agree: {'; '.join(differences)}. Start all of them with the same program, options "
            "and data."
        )


def check_shared_directory(accelerator: Accelerator, directory: Path, seconds: float = 10.0) -> None:
    """Check that `directory`, which must exist on rank 0, is the same directory on all nodes.

    Collective. `seconds` is how long a network file system may take to show a new file. Raises UserError.
    """
    if accelerator.num_processes == 1:
        return
    name = [f".shared-{uuid.uuid4().hex}"]
    broadcast_object_list(name)
    probe = directory / name[0]
    if accelerator.is_main_process:
        open_to_write(probe, "xb").close()
    accelerator.wait_for_everyone()
    deadline = time.monotonic() + seconds
    while not (seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = sorted({host for host, saw in gather_object([(hostname(), seen)]) if not saw})
    if accelerator.is_main_process:
        probe.unlink()
    if blind:
        raise UserError(
            f"{directory} is not shared by all nodes: what rank 0 writes there is not visible on {', '.join(blind)}. "
            "Choose an --output-dir on a file system that all nodes share."
        )


def end_world() -> None:
    """Leave the process group, if there is one. A program does this last, and only if it ended without an error."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
