"""The network: how fast do the processes add up their gradients, and is the sum right?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import P2POp

from accel_train.tools.doctor.check import FAIL, NA, Examination, Finding, judged
from accel_train.tools.workload import device_name

BUCKET, GPU_BYTES, REPEATS = 25 * 2**20, 2**28, 3  # DDP's bucket; GPUs reach their full speed only with more
# 80 % of https://github.com/stas00/ml-engineering, network/benchmarks; H200 has the links of H100
NVLINK = {"H100": 368e9, "H200": 368e9, "A100": 182e9}  # bytes a second
PAIR_BYTES, SLOW_PAIR, MOST_IN_PAIRS = 4 * 2**20, 0.5, 32
INFINIBAND = Path("/sys/class/infiniband")
INFINIBAND_BUS = 5e9  # half of one adapter of 100 Gb/s; sockets reach less
SLOW_BUS = 0.5e9  # half of a 10-Gigabit network
SLOW_BUS_OF_CPUS = 0.05e9  # half of a 1-Gigabit network: gloo's sum alone takes a CPU as long as such a network


def all_reduce(exam: Examination) -> Finding:
    """The speed and the result of a sum over all ranks."""
    ranks, device = exam.launch.world_size, exam.accelerator.device
    if ranks == 1:
        return Finding(NA, "a single process")
    size = BUCKET if device.type == "cpu" else GPU_BYTES
    seconds, right = 0.0, True
    for repeat in range(REPEATS + 1):  # the first one connects
        values = torch.ones(size // 4, device=device)
        exam.accelerator.wait_for_everyone()
        began = time.perf_counter()
        distributed.all_reduce(values)
        right &= values[-1].item() == ranks
        seconds = max(seconds, time.perf_counter() - began) if repeat else 0.0
    everyone = exam.gather((seconds, right, INFINIBAND.is_dir() and any(INFINIBAND.iterdir())))
    if wrong := [rank for rank, (_, right, _) in enumerate(everyone) if not right]:
        return Finding(FAIL, f"{exam.names(wrong)} gets a wrong sum", "the right sum", "A device is broken: drain it.")
    bus = bus_bandwidth(size, max(seconds for seconds, *_ in everyone), ranks)
    measured = f"{bus / 1e9:.2g} GB/s of bus bandwidth, the slowest of {REPEATS} sums of {size / 2**20:.0f} MiB"
    infiniband, hosts = all(has for *_, has in everyone), len(set(exam.hosts))
    return judged_bus(measured, bus, device_name(device), hosts=hosts, infiniband=infiniband)


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second through the slowest link of an all-reduce (nccl-tests, PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def judged_bus(measured: str, bus: float, device: str, *, hosts: int, infiniband: bool) -> Finding:
    """Judge the bus bandwidth by what the links between such devices reach. `device`: its name, or "cpu"."""
    if hosts == 1:
        needed = next((speed for name, speed in NVLINK.items() if name in device and "PCIe" not in device), 0.0)
        advice = "Look at nvidia-smi topo -m and nvlink --status: a link may be down, or the GPUs have none."
        return judged(bus >= needed, measured, f"{needed / 1e9:.0f} GB/s through NVLink" if needed else "", advice)
    needed = SLOW_BUS_OF_CPUS if device == "cpu" else INFINIBAND_BUS if infiniband else SLOW_BUS
    advice = "Compare NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME with the names of the fast interfaces (ip link)."
    if needed == INFINIBAND_BUS:
        advice = "NCCL may not use InfiniBand: look at ibstat, NCCL_IB_DISABLE, NCCL_IB_HCA; libibverbs in a container."
    return judged(bus >= needed, measured, f"{needed / 1e9} GB/s between nodes", advice)


def slowest_pair(exam: Examination) -> Finding:
    """The speed from one host to another, between all pairs of hosts; of ranks, if there is one host."""
    ranks = [exam.hosts.index(host) for host in dict.fromkeys(exam.hosts)]
    if len(ranks) == 1:
        ranks = list(range(len(exam.hosts)))
    expected = f"at least {SLOW_PAIR:.0%} of the median pair's speed"
    if not 3 <= len(ranks) <= MOST_IN_PAIRS:
        return Finding(NA, f"found {len(ranks)} hosts or ranks; needs 3 to {MOST_IN_PAIRS}", expected)
    mine = _receive_from_others(exam, ranks) if exam.launch.rank in ranks else {}
    seconds = {pair: took for times in exam.gather(mine) for pair, took in times.items()}
    slowest = max(seconds, key=lambda pair: seconds[pair])
    speed, median = PAIR_BYTES / seconds[slowest], PAIR_BYTES / statistics.median(seconds.values())
    measured = f"{exam.names(slowest)}: {speed / 1e9:.2g} GB/s, median {median / 1e9:.2g} GB/s"
    good = len(set(exam.hosts)) == 1 or speed >= SLOW_PAIR * median
    return judged(good, measured, expected, f"Look at both cables; or --exclude={exam.hosts[slowest[1]]}")


def _receive_from_others(exam: Examination, ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """The seconds for PAIR_BYTES from each of the other `ranks`: in turn s, each sends to the one s places further."""
    sent, seconds = torch.zeros(PAIR_BYTES // 4, device=exam.accelerator.device), dict[tuple[int, int], float]()
    received, place = torch.empty_like(sent), ranks.index(exam.launch.rank)
    for repeat in range(3):  # the first one connects; of the others the faster one counts
        for turn in range(1, len(ranks)):
            to, source = ranks[(place + turn) % len(ranks)], ranks[place - turn]
            began = time.perf_counter()
            both = [P2POp(distributed.isend, sent, to), P2POp(distributed.irecv, received, source)]
            for work in distributed.batch_isend_irecv(both):
                work.wait()
            received[-1].item()
            took = time.perf_counter() - began
            if repeat:
                seconds[source, exam.launch.rank] = min(took, seconds.get((source, exam.launch.rank), took))
    return seconds
