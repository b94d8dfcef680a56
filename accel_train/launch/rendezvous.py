"""The meeting of all processes before training: do they all exist?

If a process group cannot be created, torch's errors name neither the missing hosts nor the reason. So all processes
first meet in the group's store, where each one writes who it is.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

from torch import distributed

from accel_train.errors import UserError, reason_of
from accel_train.launch.environment import Launch
from accel_train.launch.process import hostname, ranges, restart_count
from accel_train.launch.stopping import FROM_LAUNCHER, recorded_stop_signal

AFTER_SIGTERM_SECONDS = 15.0  # launchers send SIGKILL 30 s after it
VERDICT_SECONDS = 5.0  # for rank 0 to write whether all is well
MOST_PAUSE, READ_SECONDS = 1.0, 2.0  # between two questions of a rank that waits; for all to read the answer
CONNECT_SECONDS = 20.0  # to a store that is there
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
    ranks would ask for a million records.
    """
    prefix = f"accel_train/{restart_count()}"
    if store.add(f"{prefix}/started/{launch.rank}", 1) > 1:
        raise UserError(
            f"Rank {launch.rank} exists twice; the second is on {hostname()}. Give each node its own ranks, and each "
            "training a MASTER_PORT of its own.",
            every_process=False,
        )
    keys, verdict = [f"{prefix}/{rank}" for rank in range(launch.world_size)], f"{prefix}/met"
    began = time.monotonic()
    mine = [launch.rank, hostname(), launch.world_size]
    first = json.loads(store.compare_set(f"{prefix}/first", "", json.dumps(mine)))
    if trouble := trouble or _other_world_size(first, mine):
        store.compare_set(verdict, "", json.dumps(trouble))  # before the record: who has all records has it, too
    store.set(keys[launch.rank], json.dumps([hostname(), device_id]))
    is_late = False
    try:
        if launch.rank == 0:
            _wait_for(store, keys, verdict, began + seconds)
            if not store.check([verdict]):
                store.compare_set(verdict, "", json.dumps(_shared_gpu(store.multi_get(keys))))
        else:  # rank 0 gives up first, and says who is missing
            _wait_for(store, [verdict], verdict, began + seconds + VERDICT_SECONDS)
    except TimeoutError:
        is_late = launch.rank > 0 and store.add(f"{verdict}/late", 1) == 1  # the first that waits for rank 0 in vain
        if launch.rank == 0 or is_late:
            store.compare_set(verdict, "", json.dumps(_missing(store, keys, time.monotonic() - began)))
    if found := json.loads(store.get(verdict)):
        if launch.rank == 0:
            time.sleep(READ_SECONDS)  # rank 0 may serve the store
        raise UserError(found, every_process=not is_late)


def _other_world_size(first: list[Any], mine: list[Any]) -> str:
    """Says that the first rank that came expects another number of processes than this one; "" if not so."""
    if first[-1] == mine[-1]:
        return ""
    (rank, host, size), (other, its_host, its_size) = sorted((first, mine))
    return (
        f"Rank {rank} on {host} expects {size} processes, but rank {other} on {its_host} expects {its_size}. Give all "
        "launchers the same number."
    )


def _shared_gpu(records: list[bytes]) -> str:
    """Says which ranks share a GPU; "" if none does."""
    users = defaultdict(list)
    for rank, record in enumerate(records):
        host, device = json.loads(record)
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


def _wait_for(store: Any, keys: list[str], verdict: str, deadline: float) -> None:
    """Wait until the store has all `keys`, or a verdict. Raises TimeoutError, AFTER_SIGTERM_SECONDS after SIGTERM, too.

    A launcher sends SIGTERM to the other processes when one has failed. (`store.wait` cannot be interrupted, and prints
    a warning for each time-out.)
    """
    pause = 0.05
    for first in range(0, len(keys), 64):  # so that it does not ask for a thousand keys each time
        while not store.check(keys[first : first + 64]) and not store.check([verdict]):
            deadline = _sooner_if_told(deadline)
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(MOST_PAUSE, pause * 1.2)  # a thousand ranks that wait for a late one must not keep rank 0 busy


def _sooner_if_told(deadline: float) -> float:
    """The deadline; AFTER_SIGTERM_SECONDS from now if the launcher has told this process to end, and that is sooner."""
    told = recorded_stop_signal() in FROM_LAUNCHER
    return min(deadline, time.monotonic() + AFTER_SIGTERM_SECONDS) if told else deadline


def _connect(launch: Launch, seconds: float) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves unless a launcher does. Raises UserError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_listener(launch, address, port, seconds)
    try:  # multi_tenant: the process group's own store joins the server of this one
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=min(seconds, CONNECT_SECONDS)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise UserError(
            f"Rank {launch.rank} on {hostname()} cannot {'open' if serves else 'use'} the store of all processes at "
            f"{address}:{port} ({reason_of(error, 200)}). MASTER_ADDR must name rank 0's host, and MASTER_PORT a port "
            "that no other program uses there.",
            every_process=False,
        ) from None
    store.set_timeout(timedelta(seconds=seconds))
    return store


def _wait_for_listener(launch: Launch, address: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there. Raises UserError.

    torch's own attempt to connect would go on for all its time, also after SIGTERM. A name that is unknown (from a
    wrong list of nodes, say) gets less time than a process that is late.
    """
    began, pause = time.monotonic(), 0.05
    deadline = began + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror):
                deadline = min(deadline, began + RESOLVE_SECONDS)
            if time.monotonic() > (deadline := _sooner_if_told(deadline)):
                raise UserError(
                    f"Rank {launch.rank} on {hostname()} found nobody at {address}:{port} within "
                    f"{time.monotonic() - began:.0f} s, where rank 0 should listen ({reason_of(error)}). Check that "
                    "its node is up, its process runs, MASTER_ADDR is its name, and no firewall blocks it."
                    + _signal_meanwhile(),
                    every_process=False,
                ) from None
        time.sleep(pause)
        pause = min(MOST_PAUSE, pause * 1.2)


def _signal_meanwhile() -> str:
    """A sentence about the launcher's signal to end, if one has come; else ""."""
    name = recorded_stop_signal()
    return f" {name} came meanwhile. Has a process failed? See its message." if name in FROM_LAUNCHER else ""


def _missing(store: Any, keys: list[str], seconds: float) -> str:
    """The message that names the ranks that are missing after `seconds`."""
    present = {rank for rank, key in enumerate(keys) if store.check([key])}
    hosts = {json.loads(store.get(keys[rank]))[0] for rank in present}
    return (
        f"{len(present)} of {len(keys)} processes met within {seconds:.0f} s, on {', '.join(sorted(hosts))}. "
        f"Missing: ranks {ranges(set(range(len(keys))) - present)}." + _signal_meanwhile()
    )
