"""The machine of a measurement: its processor, its device, and the peaks of memory use."""

from __future__ import annotations

import contextlib
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from accel_train.launch.process import available_cores


def machine(device: torch.device) -> dict[str, Any]:
    """Return the names of the processor and of `device`, cores, threads, and the host's memory in bytes.

    "computes_bf16": whether the device has instructions for it.
    """
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": device_name(device),
        "computes_bf16": computes_bf16(device),
    }


def processor_name() -> str:
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor() or platform.machine()


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16: they are faster there, not only smaller."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    with contextlib.suppress(OSError):
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(Path("/proc/cpuinfo").read_text().split()))  # bf16: Arm
    return False


def device_name(device: torch.device) -> str:
    """Return the name of the device ("NVIDIA A100-SXM4-80GB"), or its type ("cpu") if torch knows no name."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks of memory use (that of the host on Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if hasattr(module := torch.get_device_module(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def host_peak_bytes() -> int:
    """Return the peak of this process's host memory, without its data workers, in bytes."""
    with contextlib.suppress(OSError):
        if match := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device) -> int | None:
    """Return the peak of tensors' memory on `device` in bytes, or None if torch does not count it."""
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else None
