"""The nodes and the network between them: is each node as fast as the others, does it compute the same, and how fast
are sums over all processes?
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import distributed
from torch.distributed import P2POp

from accel_train.errors import counted
from accel_train.launch.process import available_cores, core_set, hostname
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN, Examination, Finding, judged, on_each_rank, same

CPU_MAX, CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LEAST_MEMORY, LEAST_SHARED_MEMORY = 2 * 2**30, 2**30  # bytes of a process, and of a node
SHARED_MEMORY = Path("/dev/shm")
SIZE, GPU_SIZE, SECONDS = 1024, 4096, 0.5  # a product takes some milliseconds, so that it is not the start that counts
SLOW, VERY_SLOW = 0.95, 0.9  # of the median of all ranks (imbue's gpu_stress_test)
SLOW_CPU = 0.7  # processors share caches and power with others: less than that is rare without a reason
CONTEXT = 2 * 2**30  # bytes of a GPU that a process may take before it trains
# https://github.com/stas00/ml-engineering, nvidia/debug.md: each of these asks for a reset or for another GPU.
QUERY = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors",
    "remapped_rows.pending": "rows of memory that wait to be remapped",
}


def cores(exam: Examination) -> Finding:
    """Each process has the cores that the job asked for, and neither more threads nor more data workers than cores."""
    asked, threads = os.environ.get("SLURM_CPUS_PER_TASK", ""), torch.get_num_threads()
    workers = exam.config.data.workers or 0
    everyone = exam.gather((hostname(), core_set()))
    sharing = sum(1 for host, theirs in everyone if host == hostname() and theirs & core_set())

    @on_each_rank
    def look(_: Examination) -> Finding:
        usable = min(available_cores(), cpu_quota() or available_cores())
        share = usable / sharing
        found = f"{share:.3g} for each process ({usable:.3g} shared by {sharing}); {threads} threads, {workers} workers"
        if asked.isdigit() and usable < int(asked):
            advice = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK", or --cpu-bind=none'
            return Finding(WARN, found, f"{asked} a task (--cpus-per-task)", advice)
        if share < 1:
            return Finding(WARN, found, "at least one a process", "Start fewer processes, or ask for more cores.")
        if threads > share:
            advice = "Unset OMP_NUM_THREADS: accel-train divides the cores by the processes."
            return Finding(WARN, found, "no more threads than cores", advice)
        return judged(workers <= share, found, "no more workers than cores", f"--data.workers {int(share)}")

    return look(exam)


def cpu_quota(file: Path = CPU_MAX) -> float | None:
    """The limit of the control group, in cores; None: no limit."""
    with contextlib.suppress(OSError, ValueError):  # "max"
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    return None


@on_each_rank
def memory(exam: Examination) -> Finding:
    """The host's memory that the processes of a node may use."""
    limit, asked = cgroup_limit(), memory_asked()
    usable = min(number for number in (psutil.virtual_memory().total, limit, asked) if number is not None)
    share = usable / exam.hosts.count(hostname())
    found = f"{usable / 2**30:.1f} GiB a node, {share / 2**30:.1f} GiB a process"
    if limit is not None and asked is not None and limit < asked:
        advice = "Ask the administrators; until then use no more than this."
        return Finding(WARN, f"the control group allows {found}", f"{asked / 2**30:.1f} GiB (--mem)", advice)
    return judged(share >= LEAST_MEMORY, found, "2 GiB a process", "Ask for more: --mem, or --mem-per-cpu")


def cgroup_limit() -> int | None:
    """The smallest memory limit of this process's control groups and of those above, in bytes; None: no limit."""
    own = {""}
    with contextlib.suppress(OSError):
        own |= {line.split(":", 2)[2].lstrip("/") for line in OWN_CGROUP.read_text().splitlines()}  # 3:memory,…:/PATH
    groups = {above for group in map(Path, own) for above in (group, *group.parents)}
    limits = []
    for group in groups:
        for file in (CGROUPS / group / "memory.max", CGROUPS / "memory" / group / "memory.limit_in_bytes"):  # v2, v1
            with contextlib.suppress(OSError, ValueError):  # "max"
                limits.append(int(file.read_text()))
    return min(limits, default=None)


def memory_asked() -> int | None:
    """What Slurm was asked for on this node, in bytes; None: nothing, or all of the node's."""
    for name, count in (
        ("SLURM_MEM_PER_NODE", "1"),
        ("SLURM_MEM_PER_CPU", os.environ.get("SLURM_CPUS_ON_NODE", "")),
        ("SLURM_MEM_PER_GPU", os.environ.get("SLURM_GPUS_ON_NODE", "")),
    ):
        if os.environ.get(name, "").isdigit() and count.isdigit():  # in MiB; 0: all of the node's
            return int(os.environ[name]) * int(count) * 2**20 or None
    return None


@on_each_rank
def shared_memory(_: Examination) -> Finding:
    """/dev/shm, through which data workers pass their batches."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    found, expected = f"{free / 2**20:,.0f} MiB free", "1 GiB: data workers pass their batches through it"
    return judged(free >= LEAST_SHARED_MEMORY, found, expected, "In a container: --shm-size=8g, or --ipc=host.")


@on_each_rank
def gpu_health(exam: Examination) -> Finding:
    """The processes use the job's GPUs, which no other programs use and of which the driver knows no errors."""
    device, processes = exam.accelerator.device, exam.hosts.count(hostname())
    allocated = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    expected = f"{counted(allocated, 'GPU')} of this job on each node"
    if device.type != "cuda":
        if allocated == 0:
            return Finding(NA, f"the device is {device.type}")
        advice = "python -c 'import torch; print(torch.cuda.is_available())'; nvidia-smi; is it PyTorch for the CPU?"
        return Finding(WARN if os.environ.get("ACCELERATE_USE_CPU") else FAIL, "the CPU is used", expected, advice)
    if processes < allocated:
        advice = f"Start {allocated} processes on each node (--num_processes, PROCESSES_PER_NODE)."
        return Finding(WARN, f"{processes} of {allocated} GPUs are used", expected, advice)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    if used > CONTEXT * processes:  # some may share one GPU
        found = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB of {device} are used by other programs"
        advice = "nvidia-smi shows its programs; a killed job's processes may be left: ask for another node."
        return Finding(WARN, found, "less than 2 GiB: the context", advice)
    if exam.launch.local_rank != 0:  # one process asks for all GPUs of a node
        return Finding(PASS, "")
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
    return judged_health(subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout)


def judged_health(table: str) -> Finding:
    """Judge what nvidia-smi has printed for QUERY: a line for each GPU."""
    expected = f"no {', no '.join(QUERY.values())}"
    for gpu, values in enumerate(gpus := table.splitlines()):
        for trouble, value in zip(QUERY.values(), values.split(", "), strict=False):
            if value not in ("0", "No", "Not Active") and not value.startswith("["):  # [N/A], [Not Supported]
                found = f"GPU {gpu} of {hostname()}: {trouble} ({value})"
                return Finding(FAIL, found, expected, "Have it reset, or ask for another node.")
    return Finding(PASS, counted(len(gpus), "GPU"), expected)


def matmul(exam: Examination) -> Finding:
    """Products of matrices in float32 on each rank: their speed against the median of all, and their bits."""
    device = exam.accelerator.device
    size = SIZE if device.type == "cpu" else GPU_SIZE
    # Made on the CPU, so that all ranks multiply the same. Small integers: no sum is rounded, in whatever order.
    left, right = (torch.randint(-1, 2, (size, size), generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    a, b = left.to(device, torch.float32), right.to(device, torch.float32)
    digest = int(((a @ b).to(torch.int64) * torch.arange(size, device=device)).sum().item())
    exam.accelerator.wait_for_everyone()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        count += 1
    rate = 2 * size**3 * count / (time.perf_counter() - began) / 1e9
    rates, bits = exam.gather(rate), same(exam, {"the product's sum": str(digest)}, "Drain this node.")
    median = statistics.median(rates)
    found, expected = f"median {median:,.0f} GFLOP/s on {device.type}", "as fast as the median of all ranks, equal bits"
    if bits.status == FAIL:
        return bits
    rank, slowest = min(enumerate(rates), key=lambda each: each[1])
    is_cpu = device.type == "cpu"
    if slowest >= (SLOW_CPU if is_cpu else SLOW) * median:
        return Finding(PASS, found, expected)
    status = FAIL if slowest < VERY_SLOW * median and not is_cpu else WARN
    found = f"{exam.names([rank])} has {slowest / median:.0%} of the {found}"
    return Finding(status, found, expected, f"All ranks wait for it. Look for other programs on {exam.hosts[rank]}.")


BUCKET, GPU_BYTES, REPEATS = 25 * 2**20, 2**28, 3  # DDP's bucket; GPUs reach their full speed only with more
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
    bus = size / max(seconds for seconds, *_ in everyone) * 2 * (ranks - 1) / ranks  # nccl-tests, PERFORMANCE.md
    measured = f"{bus / 1e9:.2g} GB/s of bus bandwidth, the slowest of {REPEATS} sums of {size / 2**20:.0f} MiB"
    infiniband, hosts = all(has for *_, has in everyone), len(set(exam.hosts))
    return judged_bus(measured, bus, device.type, hosts=hosts, infiniband=infiniband)


def judged_bus(measured: str, bus: float, device: str, *, hosts: int, infiniband: bool) -> Finding:
    """Judge the bus bandwidth by what a network between hosts reaches. `device`: its type, such as "cpu"."""
    if hosts == 1:
        return Finding(PASS, measured)
    needed = SLOW_BUS_OF_CPUS if device == "cpu" else INFINIBAND_BUS if infiniband else SLOW_BUS
    advice = "Compare NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or NCCL_IB_HCA with the fast interfaces (ip link, ibstat)."
    return judged(bus >= needed, measured, f"{needed / 1e9} GB/s between nodes", advice)


def slowest_pair(exam: Examination) -> Finding:
    """The speed from one host to another, between all pairs of hosts."""
    ranks = [exam.hosts.index(host) for host in dict.fromkeys(exam.hosts)]
    expected = f"at least {SLOW_PAIR:.0%} of the median pair's speed"
    if not 3 <= len(ranks) <= MOST_IN_PAIRS:
        return Finding(NA, f"{counted(len(ranks), 'host')}; needs 3 to {MOST_IN_PAIRS}", expected)
    mine = _receive_from_others(exam, ranks) if exam.launch.rank in ranks else {}
    seconds = {pair: took for times in exam.gather(mine) for pair, took in times.items()}
    slowest = max(seconds, key=lambda pair: seconds[pair])
    speed, median = PAIR_BYTES / seconds[slowest], PAIR_BYTES / statistics.median(seconds.values())
    measured = f"{exam.names(slowest)}: {speed / 1e9:.2g} GB/s, median {median / 1e9:.2g} GB/s"
    advice = f"Look at both cables; or --exclude={exam.hosts[slowest[1]]}"
    return judged(speed >= SLOW_PAIR * median, measured, expected, advice)


def _receive_from_others(exam: Examination, ranks: Sequence[int]) -> dict[tuple[int, int], float]:
    """The seconds for PAIR_BYTES from each of the other `ranks`: in turn s, each sends to the one s places further."""
    sent, seconds = torch.zeros(PAIR_BYTES // 4, device=exam.accelerator.device), dict[tuple[int, int], float]()
    received, place = torch.empty_like(sent), ranks.index(exam.launch.rank)
    for _ in range(3):  # the first one connects; the fastest one counts
        for turn in range(1, len(ranks)):
            to, source = ranks[(place + turn) % len(ranks)], ranks[place - turn]
            began = time.perf_counter()
            both = [P2POp(distributed.isend, sent, to), P2POp(distributed.irecv, received, source)]
            for work in distributed.batch_isend_irecv(both):
                work.wait()
            received[-1].item()
            took = time.perf_counter() - began
            seconds[source, exam.launch.rank] = min(took, seconds.get((source, exam.launch.rank), took))
    return seconds
