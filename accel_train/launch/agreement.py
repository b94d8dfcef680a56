"""All processes act alike: one decides for all, all end if one must, and they agree on what they do.

What only the main process can know (a clock, a disk) is sent to the others. What every process finds on its own (its
copy of the data) may be wrong on one of them.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from accel_train.compat import process_group_store
from accel_train.errors import UserError, reason_of
from accel_train.files import open_to_write
from accel_train.launch.process import hostname, ranges, restart_count

T = TypeVar("T")
TICK_SECONDS, LEAVE_SECONDS = 1.0, 5.0
SILENT_TICKS = 900
"""Of this process, so that those of a job that was suspended do not count. Asking a slow storage takes minutes."""
_rounds = itertools.count()  # of `once_a_node`: each has keys of its own


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
def connecting() -> Iterator[None]:
    """Turn gloo's errors while it creates a group, and connects all processes with each other, into a UserError.

    gloo listens at the address to which this host resolves its own name. The other hosts may be unable to reach it.
    """
    try:
        yield
    except RuntimeError as error:
        # torch.distributed.DistStoreError: the address of another one did not come in time
        if not isinstance(error, torch.distributed.DistStoreError) and "gloo" not in str(error).lower():
            raise
        raise UserError(
            f"The processes cannot connect to each other ({hostname()}: {reason_of(error, 200)}). If one has failed, "
            "see its message. Each listens at the address of its host's name. Set GLOO_SOCKET_IFNAME on all nodes to "
            "the interface that they share.",
            every_process=False,
        ) from error


@contextmanager
def naming_lost_processes() -> Iterator[None]:
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
        error.every_process = True  # one of them prints it
        raise error
    return result  # type: ignore[return-value]


def once_a_node(
    accelerator: Accelerator, what: str, work: Callable[[Callable[[str], None]], str], stopped: Callable[[], str]
) -> str:
    """Let one process of each node do `work`, which may take hours, while the others wait without a collective.

    `what`: the work, in messages: "staging". `work` calls the function that it is given about each second, with a text
    on which all nodes must agree ("" until it is known), and returns that text. `stopped`: returns why this process is
    to end, or "". If one process fails, is to end or is not heard of, all raise the same UserError.
    """
    node = _NodeWork(accelerator, what, stopped)
    with naming_lost_processes():
        try:
            fact = work(node.tick) if accelerator.is_local_main_process else ""
            while not (agreed := node.agreed(fact)):
                time.sleep(TICK_SECONDS)
            return agreed
        except UserError as error:
            raise node.failed(error) from error


class _NodeWork:
    """What the processes tell each other during `once_a_node`, in the process group's store."""

    def __init__(self, accelerator: Accelerator, what: str, stopped: Callable[[], str]) -> None:
        self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.what, self.stopped = what, stopped
        mains = gather_object([accelerator.is_local_main_process]) if self.processes > 1 else [True]
        self.mains = [rank for rank, is_main in enumerate(mains) if is_main]
        stores: Any = torch.distributed
        # A connection of its own: a collective may hold the lock of the group's.
        store = process_group_store().clone() if self.processes > 1 else stores.HashStore()
        self.store = stores.PrefixStore(f"accel_train/{what}/{restart_count()}/{next(_rounds)}", store)
        self.ticks, self.last_heard = 0, dict[int, tuple[Any, int]]()  # a rank: what it said, and our tick then

    def tick(self, fact: str, *, done: bool = False) -> None:
        """Say that this process lives, and look at the others. Raises UserError."""
        self.ticks += 1
        if reason := self.stopped():
            raise UserError(f"Stopped by {reason} while {self.what}: the same command goes on with what is there.")
        if self.store.check(["failed"]):
            raise UserError(*json.loads(self.store.get("failed")))
        if self.rank in self.mains:
            self.store.set(str(self.rank), json.dumps([self.ticks, hostname(), fact, done]))
        watched = self.mains if self.rank == 0 else self.mains[:1]
        said = {rank: json.loads(self.store.get(str(rank))) for rank in watched if self.store.check([str(rank)])}
        for rank, words in said.items():
            if self.last_heard.get(rank, ("", 0))[0] != words:
                self.last_heard[rank] = words, self.ticks
            elif self.ticks - self.last_heard[rank][1] > SILENT_TICKS:
                raise UserError(f"{words[1]} has not been heard of for long, while {self.what}: was it lost?")
        facts = {fact: host for _, host, fact, _ in said.values() if fact}
        if len(facts) > 1:
            different = ", ".join(f"{host} {fact}" for fact, host in facts.items())
            raise UserError(f"The nodes do not find the same while {self.what} ({different}): start again.")
        if self.rank == 0 and len(said) == len(self.mains) and all(done for *_, done in said.values()):
            self.store.set("agreed", fact)

    def agreed(self, fact: str) -> str:
        """The text on which all nodes agree, once all of them are done; else ""."""
        self.tick(fact, done=True)
        return self.store.get("agreed").decode() if self.store.check(["agreed"]) else ""

    def failed(self, error: UserError) -> UserError:
        """The error that all processes raise: that of the first which has failed."""
        first = json.loads(self.store.compare_set("failed", "", json.dumps(error.messages)))
        left, deadline = self.store.add("left", 1), time.monotonic() + LEAVE_SECONDS
        while self.rank == 0 and left < self.processes and time.monotonic() < deadline:
            time.sleep(0.1)  # the store may end with this process
            left = self.store.add("left", 0)
        return UserError(*first, code=error.code)


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
