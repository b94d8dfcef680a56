"""Checks before training that all processes of the run exist and agree.

If a process group cannot be created, torch's errors name neither the missing hosts nor the reason. So all processes
first meet in the group's store, where each one writes who it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import distributed

from accel_train.errors import UserError
from accel_train.launch.environment import Launch, allocated_hosts
from accel_train.launch.process import hostname
from accel_train.launch.signals import recorded_stop_signal

AFTER_SIGTERM_SECONDS = 15.0  # launchers send SIGKILL 30 s after it
RESOLVE_SECONDS = 20.0  # for a name service that is slow to know a new host


def meet_all_ranks(launch: Launch, device_id: str, seconds: float) -> Any:
    """Wait at most `seconds` for all processes at MASTER_ADDR:MASTER_PORT, and compare what they know.

    `device_id` is the GPU of this process, or "". Returns the store in which they met. Rank 0 may be serving it: keep
    it until the process group exists, which then shares it. Returns None for a single process.

    Raises UserError if ranks are missing, exist twice, expect different world sizes, or share a GPU of a host.
    """
    if launch.world_size == 1:
        return None
    store = _connect(launch, seconds)
    try:
        _check_ranks(store, launch, device_id, seconds)
    except RuntimeError as error:
        raise UserError(
            f"Rank {launch.rank} on {hostname()} lost the connection to rank 0 before all processes had met "
            f"({_first_line(error)}). Look for rank 0's own error message.",
            every_process=False,
        ) from None
    return store


def _check_ranks(store: Any, launch: Launch, device_id: str, seconds: float) -> None:
    """Write who this process is, wait for all others, and compare. Raises UserError."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun --max-restarts keeps the store
    if store.add(f"accel_train/{attempt}/started/{launch.rank}", 1) > 1:
        raise UserError(
            f"Rank {launch.rank} exists twice; the second is on {hostname()}. Give each node its own ranks.",
            every_process=False,
        )
    keys = [f"accel_train/{attempt}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps([hostname(), device_id, launch.world_size]))
    _wait_for_keys(store, keys, seconds)
    users = defaultdict(list)
    for rank, record in enumerate(store.multi_get(keys)):
        host, device, world_size = json.loads(record)
        if world_size != launch.world_size:
            raise UserError(
                f"Rank {launch.rank} on {hostname()} expects {launch.world_size} processes, but rank {rank} "
                f"on {host} expects {world_size}. Give all launchers the same number.",
                every_process=False,
            )
        users[host, device].append(rank)
    for (host, device), ranks in users.items():
        if device and len(ranks) > 1:
            raise UserError(
                f"Ranks {_ranges(ranks)} on {host} share one GPU ({device}). Start one process for each GPU; each "
                "may see its own GPU only, or all GPUs. NCCL cannot connect MIG slices of one GPU. "
                "--share-gpus true allows sharing, which is slow; "
                "ACCELERATE_USE_CPU=true trains on the CPU."
            )


def _wait_for_keys(store: Any, keys: list[str], seconds: float) -> None:
    """Wait until the store has all `keys`. Raises UserError after `seconds`, or AFTER_SIGTERM_SECONDS after SIGTERM.

    A launcher sends SIGTERM to the other processes when one has failed. (`store.wait` cannot be interrupted, and prints
    a warning for each time-out.)
    """
    began = time.monotonic()
    deadline = began + seconds
    for first in range(0, len(keys), 64):  # so that a thousand processes do not ask for a thousand keys each time
        while not store.check(keys[first : first + 64]):
            now = time.monotonic()
            if recorded_stop_signal() == "SIGTERM":
                deadline = min(deadline, now + AFTER_SIGTERM_SECONDS)
            if now > deadline:
                raise UserError(_missing(store, keys, now - began))
            time.sleep(0.1)


def _connect(launch: Launch, seconds: float) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 serves unless a launcher does. Raises UserError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _resolve(launch, address, min(seconds, RESOLVE_SECONDS))
    serves = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:  # multi_tenant: the process group's own store joins the server of this one
        return distributed.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            is_master=serves,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        if serves and "client socket" in str(error):
            reason = f"cannot connect to its own store at {address}:{port}. Does MASTER_ADDR name a different host?"
        elif serves:
            reason = f"cannot listen on port {port} ({_first_line(error)}). If another program uses it, set "
            reason += "MASTER_PORT to a free port."
        else:
            reason = f"found nobody at {address}:{port} within {seconds:.0f} s, where rank 0 should listen. Check that "
            reason += (
                "its node is up and its process runs, that MASTER_ADDR is its name, and that no firewall blocks it."
            )
        raise UserError(f"Rank {launch.rank} on {hostname()} {reason}", every_process=False) from None


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
    by_sigterm = recorded_stop_signal() == "SIGTERM"
    return (
        f"{len(present)} of {len(keys)} processes met within {seconds:.0f} s, on {', '.join(sorted(hosts))}. "
        f"Missing: ranks {_ranges(set(range(len(keys))) - present)}"
        + (f", and every process of the nodes {', '.join(silent)}." if silent else ".")
        + (" SIGTERM came meanwhile. Has a process failed? See its message." if by_sigterm else "")
    )


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
            f"{name} is {value!r} on ranks {_ranges(ranks)} ({host}), {expected!r} on rank 0 ({first_host})"
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
        probe.touch()
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


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Turn gloo's errors while it creates a group, and connects all processes with each other, into a UserError.

    gloo listens at the address to which this host resolves its own name. The other hosts may be unable to reach it.
    """
    try:
        yield
    except RuntimeError as error:
        absent = isinstance(error, distributed.DistStoreError)  # the address of another one did not come in time
        if not absent and "gloo" not in str(error).lower():
            raise
        if absent:
            raise UserError(
                f"{hostname()} did not learn in time where another process listens ({_first_line(error)}). That "
                "process has failed (see its message) or cannot listen. Set GLOO_SOCKET_IFNAME on all nodes to the "
                "interface that they share.",
                every_process=False,
            ) from error
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:
            address = "no address"
        raise UserError(
            f"The processes cannot connect to each other ({hostname()}: {_first_line(error)}). Each listens at the "
            f"address of its host's name, here {address}. Set GLOO_SOCKET_IFNAME on all nodes to the interface "
            "that they share.",
            every_process=False,
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _ranges(ranks: Iterable[int]) -> str:
    """Numbers for a message: 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def collective_seconds(limit: float) -> float:
    """The time-out of collectives where the watchdog ends a hang after `limit` seconds (0: never); it comes first."""
    return limit + 60 if limit else timedelta(days=365).total_seconds()
