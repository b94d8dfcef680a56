"""What a measurement stands on: the processor, the device, and the most memory that was in use."""

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
    """Of this process's host: the names of its processor and of `device`, cores, threads, memory in bytes."""
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": device_name(device),
    }


def processor_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return found[1]
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The device's own name ("NVIDIA A100-SXM4-80GB"), or its type where torch knows none: "cpu"."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def reset_peaks(device: torch.device) -> None:
    """From now on the peaks are counted anew (that of the host on Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if hasattr(module := torch.get_device_module(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def host_peak_bytes() -> int:
    """The most memory of the host that this process (without its data workers) has had at once."""
    with contextlib.suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text()):
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes(device: torch.device) -> int | None:
    """The most memory of `device` that tensors have had at once; None where torch does not count it."""
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else None
