"""The network: how fast do the processes add up their gradients, and is the sum right?"""

from __future__ import annotations

import os
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from accel_train.bench.workload import device_name
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN, Check, Examination, Finding, judged, on_each_rank

BUCKET, LARGE, REPEATS = 25 * 2**20, 2**30, 5  # bytes: DDP's bucket, and the size that nccl-tests judges by
# https://github.com/stas00/ml-engineering, network/benchmarks; H200 has the links of H100
NVLINK = {"H100": 460e9, "H200": 460e9, "A100": 228e9}
SLOW_PAIR, MOST_IN_PAIRS = 0.5, 32
INFINIBAND = Path("/sys/class/infiniband")
NCCL_LOG = "accel-train-doctor-nccl"
SLOW_BUS = 0.5e9  # bytes a second: half of a 10-Gigabit network
SLOW_BUS_OF_CPUS = 0.05e9  # half of a 1-Gigabit network: gloo's sum alone takes a CPU as long as such a network


def all_reduce(exam: Examination) -> Finding:
    """The sum of DDP's bucket over all ranks; on GPUs without --quick also of 1 GiB, if there is memory for it.

    On CPUs the bucket has to do: 1 GiB takes ten seconds and more there, and several GiB of memory for each process.
    """
    ranks, device = exam.launch.world_size, exam.accelerator.device
    if ranks == 1:
        return Finding(NOT_CHECKED, "a single process")
    sizes = [BUCKET]
    if device.type == "cuda" and not exam.quick:
        free = min(exam.gather(torch.cuda.mem_get_info()[0]))
        if free > 4 * LARGE and exam.agreed(int(exam.seconds_left > 40)):
            sizes.append(LARGE)
    found, wrong, bus = [], False, 0.0
    for size in sizes:
        seconds, right = _all_reduce_seconds(exam, size, None)
        wrong |= not right
        bus = bus_bandwidth(size, seconds, ranks)
        found.append(f"{size / 2**20:.0f} MiB in {seconds * 1000:.3g} ms")
    if bad := [rank for rank, each in enumerate(exam.gather(wrong)) if each]:
        return Finding(FAIL, f"{exam.names(bad)} gets a wrong sum", "the right sum", "A device is broken: drain it.")
    measured = f"{', '.join(found)}: {bus / 1e9:.2g} GB/s of bus bandwidth, the slowest of {REPEATS}"
    members = [[rank for rank, other in enumerate(exam.hosts) if other == host] for host in dict.fromkeys(exam.hosts)]
    if len(members) > 1 and len({len(each) for each in members}) == 1 < len(members[0]):
        group, _ = distributed.new_subgroups_by_enumeration(members)
        within = bus_bandwidth(sizes[-1], _all_reduce_seconds(exam, sizes[-1], group)[0], len(members[0]))
        measured += f"; {within / 1e9:.2g} GB/s within a host"
    if len(members) == 1:
        name = device_name(device) if device.type == "cuda" and sizes[-1] == LARGE else ""
        return judged_bus(measured, bus, name)
    cards = min(exam.gather(infiniband_speed(len(members[0]))))
    if device.type == "cuda" and cards and sizes[-1] == LARGE:
        advice = "Look at ibstat and at transport below; NCCL_IB_HCA names the adapters."
        return judged_speed(measured, bus, cards, "through InfiniBand", advice)
    return judged_network(measured, bus, device.type)


def _all_reduce_seconds(exam: Examination, size: int, group: Any) -> tuple[float, bool]:
    """The longest time of all ranks and repeats for `size` bytes, and whether this rank's sums are right."""
    world, seconds, right = distributed.get_world_size(group), 0.0, True
    for repeat in range(REPEATS + 1):  # the first one connects
        values = torch.ones(size // 4, device=exam.accelerator.device)
        exam.accelerator.wait_for_everyone()
        began = time.perf_counter()
        distributed.all_reduce(values, group=group)
        right &= values[-1].item() == world
        seconds = max(seconds, time.perf_counter() - began) if repeat else 0.0
    return exam.slowest(seconds), right


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second through the slowest link of an all-reduce (nccl-tests, PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def judged_bus(measured: str, bus: float, device_name: str) -> Finding:
    """Judge the bus bandwidth within a host by what its GPUs reach where they are connected by NVLink."""
    full = next((each for name, each in NVLINK.items() if name in device_name and "PCIe" not in device_name), None)
    if full is None:
        return Finding(PASS, measured, "the right sum")
    advice = "Look at nvidia-smi topo -m and nvlink --status: a link may be down, or the GPUs have none."
    return judged_speed(measured, bus, full, "through NVLink", advice)


def judged_network(measured: str, bus: float, device_type: str) -> Finding:
    """Judge the bus bandwidth between nodes by the network that such devices need."""
    needed = SLOW_BUS if device_type == "cuda" else SLOW_BUS_OF_CPUS
    advice = "Compare NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME with the names of the fast interfaces (ip link)."
    return judged(bus >= needed, measured, f"{needed / 1e9} GB/s between nodes", advice)


def judged_speed(measured: str, bus: float, full: float, way: str, advice: str) -> Finding:
    """Judge a bus bandwidth by what such links reach: less than 80 % is a WARN, less than 50 % a FAIL."""
    bad = FAIL if bus < 0.5 * full else WARN
    return judged(bus >= 0.8 * full, measured, f"{full / 1e9:.0f} GB/s {way}", advice, otherwise=bad)


def infiniband_speed(most: int, folder: Path = INFINIBAND) -> float:
    """What an all-reduce through this host's adapters of InfiniBand reaches, in bytes a second; `most` are used.

    40 GB/s of an adapter of 400 Gb/s (stas00, ml-engineering); 0 without one.
    """
    speeds = []
    for file in folder.glob("*/ports/*/rate"):  # "400 Gb/sec (4X NDR)"
        state = file.with_name("state").read_text() if file.with_name("state").exists() else "ACTIVE"
        if "ACTIVE" in state:
            speeds.append(float(file.read_text().split()[0]) * 1e8)
    return sum(sorted(speeds, reverse=True)[:most])


def interface(exam: Examination) -> Finding:
    """The address at which each process listens for the others (gloo)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = f"unknown ({error})"
    everyone = exam.gather((name, address))
    expected, wrong = "an address that the other hosts can reach", ("127.", "unknown")
    if len(set(exam.hosts)) == 1:
        return Finding(NOT_CHECKED, "one host", expected)
    if bad := [rank for rank, (given, found) in enumerate(everyone) if not given and found.startswith(wrong)]:
        measured = f"{exam.names(bad)} listens at {everyone[bad[0]][1]}"
        return Finding(WARN, measured, expected, "export GLOO_SOCKET_IFNAME=the interface that all nodes share")
    return Finding(PASS, ", ".join(sorted({given or found for given, found in everyone})[:4]), expected)


def slowest_pair(exam: Examination) -> Finding:
    """25 MiB from one host to another, between all pairs of hosts; of ranks, if there is one host."""
    ranks = [exam.hosts.index(host) for host in dict.fromkeys(exam.hosts)]
    if len(ranks) == 1:
        ranks = list(range(len(exam.hosts)))
    expected = f"at least {SLOW_PAIR:.0%} of the median pair's speed"
    if not 3 <= len(ranks) <= MOST_IN_PAIRS:
        return Finding(NOT_CHECKED, f"found {len(ranks)} hosts or ranks; needs 3 to {MOST_IN_PAIRS}", expected)
    values = torch.zeros(BUCKET // 4, device=exam.accelerator.device)
    mine: dict[tuple[int, int], float] = {}
    for turn, (first, second) in enumerate(pair for _ in range(2) for pair in _pairs(ranks)):
        if exam.launch.rank not in (first, second):
            continue
        began = time.perf_counter()
        if exam.launch.rank == first:
            distributed.send(values, second)
            distributed.recv(values, second)
        else:
            distributed.recv(values, first)
            distributed.send(values, first)
        values[-1].item()
        if turn >= len(ranks) * (len(ranks) - 1) // 2:  # the first turn connects
            mine[first, second] = time.perf_counter() - began
    seconds: dict[tuple[int, int], float] = {}
    for each in exam.gather(mine):
        for pair, took in each.items():
            seconds[pair] = max(took, seconds.get(pair, 0.0))
    slowest = max(seconds, key=lambda pair: seconds[pair])
    speed, median = 2 * BUCKET / seconds[slowest], 2 * BUCKET / statistics.median(seconds.values())
    measured = f"{exam.names(slowest)}: {speed / 1e9:.2g} GB/s, median {median / 1e9:.2g} GB/s"
    good = len(set(exam.hosts)) == 1 or speed >= SLOW_PAIR * median
    return judged(good, measured, expected, f"Look at both cables; or --exclude={exam.hosts[slowest[1]]}")


def _pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs, in rounds in which each rank is in one pair at most: the circle method of tournaments."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    pairs = []
    for _ in range(len(circle) - 1):
        for one, other in zip(circle, reversed(circle[len(circle) // 2 :]), strict=False):
            if one is not None and other is not None:
                pairs.append((min(one, other), max(one, other)))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return pairs


def listen_to_nccl() -> None:
    """Let NCCL write what it chooses to a file of this process; not if the user has asked NCCL for messages.

    Call it before the processes connect: NCCL reads the variables once.
    """
    if torch.cuda.is_available() and not any(name.startswith("NCCL_DEBUG") for name in os.environ):
        os.environ["NCCL_DEBUG"] = "INFO"
        os.environ["NCCL_DEBUG_FILE"] = f"{tempfile.gettempdir()}/{NCCL_LOG}-{os.getpid()}"


@on_each_rank
def transport(_: Examination) -> Finding:
    """Through what NCCL connects the GPUs."""
    file = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    if not file.name.startswith(NCCL_LOG):
        return Finding(NOT_CHECKED, "no NCCL, or you have set NCCL_DEBUG yourself")
    text = file.read_text(errors="replace") if file.exists() else ""
    file.unlink(missing_ok=True)
    return transport_of(text, has_infiniband())


def transport_of(log: str, infiniband: bool) -> Finding:
    """Judge what NCCL has written with NCCL_DEBUG=INFO."""
    ways = sorted(set(re.findall(r"via ((?:P2P|SHM|NET)/\S+)", log)))
    network = "".join(re.findall(r"Using network (\S+)", log)[-1:])
    expected = "InfiniBand, if the nodes have it"
    if not ways and not network:
        return Finding(NOT_CHECKED, "NCCL has connected nothing", expected)
    measured = ", ".join([*([f"network {network}"] if network else []), *ways][:4])
    unused = infiniband and (network == "Socket" or any(way.startswith("NET/Socket") for way in ways))
    advice = "NCCL does not find its InfiniBand: look at NCCL_IB_DISABLE, NCCL_IB_HCA, and libibverbs in a container."
    return judged(not unused, measured, expected, advice, otherwise=FAIL)


def has_infiniband() -> bool:
    """Whether this host has an adapter of InfiniBand."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


CHECKS = (
    Check("interface", interface, quick=True),
    Check("all-reduce", all_reduce, quick=True, seconds=4),
    Check("slowest-pair", slowest_pair, seconds=4),
    Check("transport", transport, quick=True),
)
