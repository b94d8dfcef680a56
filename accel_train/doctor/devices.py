"""The devices: is each as fast as the others, and does it compute the same?"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import torch

from accel_train.doctor.check import (
    FAIL,
    NOT_CHECKED,
    PASS,
    WARN,
    Check,
    Examination,
    Finding,
    judged,
    on_each_rank,
    worst_rank,
)
from accel_train.errors import counted, one_line
from accel_train.launch.process import hostname

SIZES, SECONDS, LEAST_SECONDS = (512, 1024, 2048, 4096, 8192), 3.0, 0.005
SLOW, VERY_SLOW = 0.95, 0.9  # of the median of all ranks (imbue's gpu_stress_test)
SLOW_CPU = 0.7  # processors share caches and power with others: less than that is rare without a reason
WORTHWHILE = 1.2  # times float32's speed
CONTEXT, COPIED = 2 * 2**30, 256 * 2**20  # bytes
TO_GPU = {"H100": 52e9, "H200": 52e9, "A100": 24e9}  # bytes a second: what Azure's node checks ask for
# https://github.com/stas00/ml-engineering, nvidia/debug.md: each of these asks for a reset or for another GPU.
QUERY = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors",
    "remapped_rows.pending": "rows of memory that wait to be remapped",
    "clocks_throttle_reasons.hw_slowdown": "a clock that the hardware slows down",
}


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16: they are faster there, not only smaller."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    with contextlib.suppress(OSError):
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(Path("/proc/cpuinfo").read_text().split()))  # bf16: Arm
    return False


def matmul(exam: Examination) -> Finding:
    """Products of matrices in float32 on each rank: their speed against the median of all, and their bits."""
    return _matmul(exam, torch.float32)


def matmul_bf16(exam: Examination) -> Finding:
    """The same in bfloat16, where the device has instructions for it."""
    if not all(exam.gather(computes_bf16(exam.accelerator.device))):
        return Finding(NOT_CHECKED, "the device has no instructions for bfloat16")
    finding = _matmul(exam, torch.bfloat16)
    config = exam.config
    if finding.status == PASS and exam.accelerator.mixed_precision == "no" and not config.bitwise:
        times = exam.measured["bfloat16"] / exam.measured.get("float32", math.inf)
        if times > WORTHWHILE:
            found = f"{finding.measured}: {times:.1f} times float32's"
            return Finding(PASS, found, "the training may use it: accelerate launch --mixed_precision bf16")
    return finding


def _matmul(exam: Examination, dtype: torch.dtype) -> Finding:
    device, name = exam.accelerator.device, str(dtype).removeprefix("torch.")
    size = exam.agreed(_size(device, dtype))
    # Made on the CPU, so that all ranks multiply the same. Small integers: no sum is rounded, in whatever order.
    left, right = (torch.randint(-1, 2, (size, size), generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    a, b = left.to(device, dtype), right.to(device, dtype)
    digest = int(((a @ b).to(torch.int64) * torch.arange(size, device=device)).sum().item())
    exam.accelerator.wait_for_everyone()
    began, count, seconds = time.perf_counter(), 0, 0.2 if exam.quick else SECONDS
    while time.perf_counter() - began < seconds:
        a @ b
        if device.type != "cpu":
            torch.accelerator.synchronize()
        count += 1
    rate = 2 * size**3 * count / (time.perf_counter() - began) / 1e9
    everyone = exam.gather((rate, digest))
    exam.measured[name] = median = statistics.median(rate for rate, _ in everyone)
    found, expected = f"median {median:,.0f} GFLOP/s on {device.type}", "as fast as the median of all ranks, equal bits"
    if wrong := [rank for rank, (_, other) in enumerate(everyone) if other != everyone[0][1]]:
        return Finding(FAIL, f"{exam.names(wrong)} has a different result than rank 0", expected, "Drain this node.")
    rank, (slowest, _) = min(enumerate(everyone), key=lambda each: each[1][0])
    is_cpu = device.type == "cpu"
    if len(everyone) > 1 and slowest < (SLOW_CPU if is_cpu else SLOW) * median:
        status = FAIL if slowest < VERY_SLOW * median and not is_cpu else WARN
        found = f"{exam.names([rank])} has {slowest / median:.0%} of the {found}"
        advice = f"All ranks wait for it. Look for other programs on {exam.hosts[rank]}."
        return Finding(status, found, expected, advice)
    return Finding(PASS, found, expected)


def _size(device: torch.device, dtype: torch.dtype) -> int:
    """The smallest size at which a product takes some milliseconds, so that it is not the start that is measured."""
    for size in SIZES:
        values = torch.ones(size, size, device=device, dtype=dtype)
        values @ values
        began = time.perf_counter()
        (values @ values)[0, 0].item()
        if time.perf_counter() - began > LEAST_SECONDS:
            break
    return size


@on_each_rank
def health(exam: Examination) -> Finding:
    """What the driver says about the GPUs."""
    if exam.accelerator.device.type != "cuda":
        return Finding(NOT_CHECKED, f"the device is {exam.accelerator.device.type}")
    if shutil.which("nvidia-smi") is None:
        return Finding(NOT_CHECKED, "there is no nvidia-smi")
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        return Finding(NOT_CHECKED, f"nvidia-smi failed: {one_line(done.stdout.strip(), 100)}")
    return judged_health(done.stdout)


def judged_health(table: str) -> Finding:
    """Judge what `nvidia-smi --query-gpu=… --format=csv` has printed for QUERY."""
    rows = list(csv.DictReader(io.StringIO(table), skipinitialspace=True))
    expected = f"no {', no '.join(QUERY.values())}"
    known = 0
    for gpu, row in enumerate(rows):
        # nvidia-smi may add units to the names of the columns, and calls the slowdown by a newer name.
        for key, value in zip(QUERY, (str(value).strip() for value in row.values()), strict=False):
            if value.startswith("["):  # [N/A], [Not Supported]
                continue
            known += 1
            if value not in ("0", "No", "Not Active"):
                slow = "throttle" in key
                advice = "Look at its temperature and power." if slow else "Have it reset, or ask for another node."
                return Finding(
                    WARN if slow else FAIL, f"GPU {gpu} of {hostname()}: {QUERY[key]} ({value})", expected, advice
                )
    if not known:
        return Finding(NOT_CHECKED, "nvidia-smi says nothing of memory and clocks", expected)
    return Finding(PASS, counted(len(rows), "GPU"), expected)


@on_each_rank
def others(exam: Examination) -> Finding:
    """Memory of the GPU that other programs use."""
    device = exam.accelerator.device
    if device.type != "cuda":
        return Finding(NOT_CHECKED, f"the device is {device.type}")
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    found, expected = f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB are used", "less than 2 GiB: the context"
    advice = "nvidia-smi shows its programs; a killed job's processes may be left: ask for another node."
    sharing = exam.hosts.count(exam.hosts[exam.launch.rank])  # some may share one GPU
    return judged(used <= CONTEXT * sharing, found, expected, advice)


def copying(exam: Examination) -> Finding:
    """How fast images come from the host's memory to the device; all ranks of a host at the same time."""
    device = exam.accelerator.device
    if device.type != "cuda":
        return Finding(NOT_CHECKED, f"the device is {device.type}")
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    exam.accelerator.wait_for_everyone()
    rates = []
    for _ in range(4):  # the first one wakes the bus
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.accelerator.synchronize()
        rates.append(COPIED / (time.perf_counter() - began))

    def look() -> Finding:
        rate, name = statistics.median(rates[1:]), torch.cuda.get_device_name(device)
        full = next((each for part, each in TO_GPU.items() if part in name), None)
        found, expected = f"{rate / 1e9:.1f} GB/s", "" if full is None else f"{full / 1e9:.0f} GB/s ({name})"
        advice = "Look at nvidia-smi -q -d PCIE, and bind processes to near cores."
        return judged(full is None or rate >= full, found, expected, advice)

    return worst_rank(exam, look)


CHECKS = (
    Check("gpu-health", health, quick=True),
    Check("gpu-memory", others, quick=True),
    Check("gpu-copy", copying, quick=True, seconds=3),
    Check("matmul", matmul, quick=True, seconds=5),
    Check("matmul-bf16", matmul_bf16, seconds=5),
)
