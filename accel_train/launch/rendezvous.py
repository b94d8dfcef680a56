"""The meeting of all processes before training: do they all exist?

If a process group cannot be created, torch's errors name neither the missing hosts nor the reason. So all processes
first meet in the group's store, where each one writes who it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed

from accel_train import __version__
from accel_train.errors import UserError, reason_of
from accel_train.launch.environment import Launch, allocated_hosts, name_of_world
from accel_train.launch.process import FROM_LAUNCHER, has_ended, hostname, ranges, recorded_stop_signal, restart_count

AFTER_SIGTERM_SECONDS = 15.0  # launchers send SIGKILL 30 s after it
VERDICT_SECONDS = 5.0  # for rank 0 to write whether all is well
MOST_PAUSE, READ_SECONDS = 1.0, 2.0  # between two questions of a rank that waits; for all to read the answer
WORLD = "accel_train/world"  # the key with which rank 0 says whose store it is
RESOLVE_SECONDS = 20.0  # for a name service that is slow to know a new host


def rendezvous_of_ranks(launch: Launch, device_id: str, seconds: float, trouble: str = "") -> Any:
    """Wait at most `seconds` for all processes at MASTER_ADDR:MASTER_PORT, and compare what they know.

    `device_id` is the GPU of this process, or "". Returns the store in which they met. Rank 0 may be serving it: keep
    it until the process group exists, which then shares it.

    Raises UserError if ranks are missing, exist twice, expect different world sizes, or share a GPU of a host; on all
    processes if one has a `trouble` (the message), because the launcher would kill the others before it is printed.
    """
    store = _connect(launch, seconds)
    try:
        _check_ranks(store, launch, device_id, seconds, trouble)
    except RuntimeError as error:
        raise UserError(
            f"Rank {launch.rank} on {hostname()} lost the connection to rank 0 before all processes had met "
            f"({reason_of(error, 200)}). Look for rank 0's own error message.",
            every_process=False,
        ) from None
    return store


def _check_ranks(store: Any, launch: Launch, device_id: str, seconds: float, trouble: str) -> None:
    """Write who this process is, wait for all others, and compare. Raises UserError.

    Rank 0 alone reads what all others have written, and writes its verdict: if each rank read all others, a thousand
    ranks would ask for a million records. The others compare their world size with rank 0's at once.
    """
    world = name_of_world(launch)
    prefix = f"accel_train/{world}/{restart_count()}"
    if launch.rank == 0:
        store.set(WORLD, world)
    if store.add(f"{prefix}/started/{launch.rank}", 1) > 1:
        raise UserError(
            f"Rank {launch.rank} exists twice; the second is on {hostname()}. Give each node its own ranks.",
            every_process=False,
        )
    keys, verdict = [f"{prefix}/{rank}" for rank in range(launch.world_size)], f"{prefix}/met"
    mine = [hostname(), device_id, launch.world_size, __version__]
    store.set(keys[launch.rank], json.dumps(mine))
    began = time.monotonic()
    found, is_first = trouble, launch.rank == 0
    try:
        if found:
            pass  # all others learn it from the verdict
        elif is_first:
            _wait_for(launch, store, keys, verdict, began + seconds)
            if not store.check([verdict]):
                found = _validate_ranks(store.multi_get(keys))
        else:  # rank 0 gives up first, and says who is missing
            _wait_for(launch, store, [WORLD], verdict, began + seconds + VERDICT_SECONDS)
            _check_world(store, launch, world)
            _wait_for(launch, store, [keys[0]], verdict, began + seconds + VERDICT_SECONDS)
            if not store.check([verdict]):
                found = _other_program({0: json.loads(store.get(keys[0])), launch.rank: mine})
            if not found:
                _wait_for(launch, store, [verdict], verdict, began + seconds + VERDICT_SECONDS)
    except TimeoutError:
        is_first = is_first or store.add(f"{verdict}/late", 1) == 1  # one of those that wait for rank 0 in vain
        if not is_first:
            raise UserError("Rank 0 does not answer.") from None  # that one says more
        found = _missing(store, keys, time.monotonic() - began)
    if found or is_first:
        first = json.loads(store.compare_set(verdict, "", json.dumps(found)))
        found = first or ("" if is_first else found)  # the first verdict counts, unless it is that all is well
    else:
        found = json.loads(store.get(verdict))
    if found:
        if launch.rank == 0:
            time.sleep(READ_SECONDS)  # rank 0 may serve the store
        raise UserError(found, every_process=launch.rank == 0 or not is_first)


def _check_world(store: Any, launch: Launch, world: str) -> None:
    """Raise UserError if rank 0 of other processes serves the store."""
    if store.check([WORLD]) and (other := store.get(WORLD).decode()) != world:
        raise UserError(
            f"Rank {launch.rank} on {hostname()} ({world}) found another training ({other}) at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}. Give each training a MASTER_PORT of its own.",
            every_process=False,
        )


def _validate_ranks(written: list[bytes]) -> str:
    """What is wrong with the records of all ranks; "" if nothing."""
    records = {rank: json.loads(record) for rank, record in enumerate(written)}
    if found := _other_program(records):
        return found
    users = defaultdict(list)
    for rank, (host, device, *_) in records.items():
        users[host, device].append(rank)
    for (host, device), ranks in users.items():
        if device and len(ranks) > 1:
            return (
                f"Ranks {ranges(ranks)} on {host} share one GPU ({device}). Start one process for each GPU; each "
                "may see its own GPU only, or all GPUs. NCCL cannot connect MIG slices of one GPU. "
                "--share-gpus true allows sharing, which is slow; "
                "ACCELERATE_USE_CPU=true trains on the CPU."
            )
    return ""


def _other_program(records: Mapping[int, Any]) -> str:
    """Says which rank runs another version of this program than rank 0, or expects another number of processes; "" if
    none does."""
    first_host, _, expected, version = records[0]
    for rank, (host, _, world_size, other) in records.items():
        if other != version:
            return (
                f"The processes run different versions of accel-train: {version} on {first_host}, {other} on {host} "
                f"(rank {rank}). Install the same one on all nodes, and activate the same environment."
            )
        if world_size != expected:
            return (
                f"Rank 0 on {first_host} expects {expected} processes, but rank {rank} on {host} expects {world_size}. "
                "Give all launchers the same number."
            )
    return ""


def _wait_for(launch: Launch, store: Any, keys: list[str], verdict: str, deadline: float) -> None:
    """Wait until the store has all `keys`, or a verdict. Raises TimeoutError, AFTER_SIGTERM_SECONDS after SIGTERM, too.

    A launcher sends SIGTERM to the other processes when one has failed. (`store.wait` cannot be interrupted, and prints
    a warning for each time-out.)
    """
    pause = 0.05
    for first in range(0, len(keys), 64):  # so that it does not ask for a thousand keys each time
        while not store.check(keys[first : first + 64]) and not store.check([verdict]):
            now = time.monotonic()
            if recorded_stop_signal() in FROM_LAUNCHER or _launcher_has_ended(launch):
                deadline = min(deadline, now + AFTER_SIGTERM_SECONDS)
            if now > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(MOST_PAUSE, pause * 1.2)  # a thousand ranks that wait for a late one must not keep rank 0 busy


def _connect(launch: Launch, seconds: float) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves unless a launcher does. Raises UserError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _resolve(launch, address, min(seconds, RESOLVE_SECONDS))
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    if not serves and (why := _wait_for_listener(launch, address, port, deadline)):
        raise UserError(
            f"Rank {launch.rank} on {hostname()} found nobody at {address}:{port}, where rank 0 or the launcher should "
            f"listen, and stops waiting: {why}.",
            every_process=False,
        )
    try:  # multi_tenant: the process group's own store joins the server of this one
        return distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if serves and "client socket" in str(error):
            reason = f"cannot connect to its own store at {address}:{port}. Does MASTER_ADDR name a different host?"
        elif serves:
            reason = f"cannot listen on port {port} ({reason_of(error, 200)}). If another program uses it, set "
            reason += "MASTER_PORT to a free port."
        else:
            reason = f"found nobody at {address}:{port} within {seconds:.0f} s, where rank 0 should listen. Check that "
            reason += "its node is up, its process runs, MASTER_ADDR is its name, and no firewall blocks it."
        raise UserError(f"Rank {launch.rank} on {hostname()} {reason}", every_process=False) from None


def _wait_for_listener(launch: Launch, address: str, port: int, deadline: float) -> str:
    """Wait until somebody listens there, or until the deadline. Returns why it ends before that, else "".

    torch's own attempt to connect would go on for all its time, also after SIGTERM and after the launcher's death.
    """
    pause, told = 0.05, ""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=min(left, 5.0)):
            return ""
        if _launcher_has_ended(launch):
            return "the launcher has ended"
        if not told and (name := recorded_stop_signal()) in FROM_LAUNCHER:
            told = f"{name} came meanwhile. Has another process failed? See its message"
            deadline = min(deadline, time.monotonic() + AFTER_SIGTERM_SECONDS)
        time.sleep(pause)
        pause = min(MOST_PAUSE, pause * 1.2)
    return told


def _launcher_has_ended(launch: Launch) -> bool:
    """Whether the launcher that started this process has ended, perhaps before this process could see which it was."""
    if launch.agent is not None:
        return has_ended(*launch.agent)
    return os.getppid() == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # an orphan


def _resolve(launch: Launch, address: str, seconds: float) -> None:
    """Raise UserError if `address` is still unknown to the name service after `seconds`.

    An unknown name (from a wrong list of nodes, say) gets less time than a process that is late.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Rank {launch.rank} on {hostname()} should find rank 0 at MASTER_ADDR={address}, but no host of "
                    f"that name is known here ({error}). Set MASTER_ADDR to the first node's name in the cluster.",
                    every_process=False,
                ) from None
        time.sleep(1)


def _missing(store: Any, keys: list[str], seconds: float) -> str:
    """The message that names the ranks and nodes that are missing after `seconds`."""
    present = {rank for rank, key in enumerate(keys) if store.check([key])}
    hosts = {json.loads(store.get(keys[rank]))[0] for rank in present}
    silent = [name for name in allocated_hosts(os.environ) if name not in hosts]
    name = recorded_stop_signal()
    return (
        f"{len(present)} of {len(keys)} processes met within {seconds:.0f} s, on {', '.join(sorted(hosts))}. "
        f"Missing: ranks {ranges(set(range(len(keys))) - present)}"
        + (f", and every process of the nodes {', '.join(silent)}." if silent else ".")
        + (f" {name} came meanwhile. Has a process failed? See its message." if name in FROM_LAUNCHER else "")
    )
