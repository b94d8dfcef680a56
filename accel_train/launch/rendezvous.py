"""Do all processes of the run exist, and do they agree? Asked once, before anything is trained.

The errors of a process group that does not come about name neither the missing hosts nor the reason. So all
processes first meet in its store, where they can say who they are.
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
from accel_train.launch.signals import noted

AFTER_SIGTERM_SECONDS = 15.0  # launchers send SIGKILL 30 s after it
RESOLVE_SECONDS = 20.0  # for a name service that is slow to know a new host


def roll_call(launch: Launch, device_id: str, seconds: float) -> Any:
    """Wait at most `seconds` for all processes at MASTER_ADDR:MASTER_PORT, and compare what they know.

    `device_id` is the GPU of this process, or "". Returns the store in which they met, and which rank 0 may
    be serving: keep it until the process group is made, which then shares it. None for a single process.

    Raises UserError if ranks are missing or exist twice, count another world, or share a GPU of a host.
    """
    if launch.world_size == 1:
        return None
    store = _connect(launch, seconds)
    try:
        _meet(store, launch, device_id, seconds)
    except RuntimeError as error:
        raise UserError(
            f"Rank {launch.rank} on {hostname()} lost rank 0 before all processes had met; look for its message "
            f"({_first_line(error)}).",
            every_process=False,
        ) from None
    return store


def _meet(store: Any, launch: Launch, device_id: str, seconds: float) -> None:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun --max-restarts keeps its store
    if store.add(f"accel_train/{attempt}/started/{launch.rank}", 1) > 1:
        raise UserError(
            f"Rank {launch.rank} exists twice; the second is on {hostname()}: give each node its own.",
            every_process=False,
        )
    keys = [f"accel_train/{attempt}/{rank}" for rank in range(launch.world_size)]
    store.set(keys[launch.rank], json.dumps([hostname(), device_id, launch.world_size]))
    _wait(store, keys, seconds)
    users = defaultdict(list)
    for rank, record in enumerate(store.multi_get(keys)):
        host, device, world_size = json.loads(record)
        if world_size != launch.world_size:
            raise UserError(
                f"Rank {launch.rank} on {hostname()} was told of {launch.world_size} processes, rank {rank} "
                f"on {host} of {world_size}: give all launchers the same number.",
                every_process=False,
            )
        users[host, device].append(rank)
    for (host, device), ranks in users.items():
        if device and len(ranks) > 1:
            raise UserError(
                f"Ranks {_ranges(ranks)} on {host} share one GPU ({device}): start one process for each GPU, "
                "and let each see its own, or all of them see all (MIG slices of one GPU cannot be connected by NCCL: "
                "one process). --share-gpus true allows it, slowly; "
                "ACCELERATE_USE_CPU=true trains on the CPU."
            )


def _wait(store: Any, keys: list[str], seconds: float) -> None:
    """Wait until all `keys` are there; not much longer once SIGTERM has come, which a launcher sends to the others when
    one of its processes has failed. (`store.wait` could not be told of that, and complains about each time-out.)"""
    began = time.monotonic()
    deadline = began + seconds
    for first in range(0, len(keys), 64):  # so that a thousand processes do not ask for a thousand keys at each look
        while not store.check(keys[first : first + 64]):
            now = time.monotonic()
            if noted() == "SIGTERM":
                deadline = min(deadline, now + AFTER_SIGTERM_SECONDS)
            if now > deadline:
                raise UserError(_missing(store, keys, now - began))
            time.sleep(0.1)


def _connect(launch: Launch, seconds: float) -> Any:
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
            reason = f"does not reach itself at {address}:{port}: is MASTER_ADDR another host's name?"
        elif serves:
            reason = f"cannot listen on port {port}: if another program has it, set MASTER_PORT to a free one"
            reason += f" ({_first_line(error)})"
        else:
            reason = f"found nobody at {address}:{port} within {seconds:.0f} s: rank 0 should be there. Is its "
            reason += "node up, did its process end, is MASTER_ADDR its name, does a firewall stand between?"
        raise UserError(f"Rank {launch.rank} on {hostname()} {reason}", every_process=False) from None


def _resolve(launch: Launch, address: str, seconds: float) -> None:
    """A name that nobody knows (a wrong list of nodes, say) is not waited for as long as a process that is late."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Rank {launch.rank} on {hostname()} is to find rank 0 at MASTER_ADDR={address}, but no host of "
                    f"that name is known here ({error}): give the first node's name as the nodes know it.",
                    every_process=False,
                ) from None
        time.sleep(1)


def _missing(store: Any, keys: list[str], seconds: float) -> str:
    present = {rank for rank, key in enumerate(keys) if store.check([key])}
    hosts = {json.loads(store.get(keys[rank]))[0] for rank in present}
    silent = [name for name in allocated_hosts(os.environ) if name not in hosts]
    return (
        f"{len(present)} of {len(keys)} processes met within {seconds:.0f} s, on {', '.join(sorted(hosts))}. "
        f"Missing: ranks {_ranges(set(range(len(keys))) - present)}"
        + (f", and every process of the nodes {', '.join(silent)}." if silent else ".")
        + (" SIGTERM came meanwhile: has one of them failed? See its message." if noted() == "SIGTERM" else "")
    )


def check_agreement(accelerator: Accelerator, **facts: str) -> None:
    """Stop if a fact (configuration, a version, the data's length, the classes) differs between processes.

    Every process must call it with the same names. Raises UserError that names the facts, ranks and hosts.
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
        for rank, (host, found) in enumerate(everyone):
            if found[name] != expected:
                others[host, found[name]].append(rank)
        differences += [
            f"{name} is {found!r} on ranks {_ranges(ranks)} ({host}), {expected!r} on rank 0 ({first_host})"
            for (host, found), ranks in others.items()
        ]
    if differences:
        raise UserError(f"The processes do not agree: {'; '.join(differences)}.")


def check_shared_directory(accelerator: Accelerator, directory: Path, seconds: float = 10.0) -> None:
    """Stop if `directory`, which must exist on rank 0, is not one and the same on all nodes.

    Every process must call it. `seconds` is how long a network file system may take to show a new file.
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
            f"{directory} is not one directory for all nodes: what rank 0 writes is not seen on "
            f"{', '.join(blind)}. Choose an --output-dir on a file system that all nodes share."
        )


def set_collective_timeout(seconds: float, group: Any = None) -> None:
    """From now on a collective (of `group`) that takes longer than this is an error; no effect on a single process."""
    if distributed.is_initialized():
        before = distributed.distributed_c10d._set_pg_timeout  # its name until it became public
        getattr(distributed, "set_timeout", before)(timedelta(seconds=seconds), group)


def set_store_timeout(seconds: float) -> None:
    """Of the process group's store, in which a process may wait for another one's first collective."""
    if distributed.is_initialized():
        distributed.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=seconds))


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Around the making of a group, when gloo connects each process with each other one.

    Raises UserError if it cannot: it listens at the address that this host's own name has here, which need not be one
    that the others can reach.
    """
    try:
        yield
    except RuntimeError as error:
        absent = isinstance(error, distributed.DistStoreError)  # the address of another one did not come in time
        if not absent and "gloo" not in str(error).lower():
            raise
        if absent:
            raise UserError(
                f"{hostname()} waited in vain for another process to say where it listens ({_first_line(error)}): that "
                "one has failed, see its message, or cannot listen: set GLOO_SOCKET_IFNAME on all nodes to the "
                "interface that they share.",
                every_process=False,
            ) from error
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:
            address = "no address"
        raise UserError(
            f"The processes cannot connect to each other ({hostname()}: {_first_line(error)}). They listen where their "
            f"host's name leads, here {address}: set GLOO_SOCKET_IFNAME on all nodes to the interface that they share.",
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
    """The time-out of collectives where a process may stand still for `limit` seconds: its stacks come first."""
    return limit + 60 if limit else timedelta(days=365).total_seconds()
