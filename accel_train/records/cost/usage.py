"""What the processes and their devices used: memory, and of NVIDIA's GPUs utilisation and energy (nvidia-ml-py)."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SAMPLE_SECONDS = 2.0


@dataclass(frozen=True)
class Used:
    """What one process has used in this start. None is what nobody has measured."""

    process_bytes: int
    """The largest resident memory of the process, without its data workers."""
    device: str
    """The identity of its device; "" for a CPU. Several processes may share one."""
    device_bytes: int | None
    """The largest memory that its tensors had on the device."""
    joules: float | None
    """What the whole device has used, also for others."""
    utilisation: float | None
    """The mean fraction of time in which a kernel ran on the device."""


class Usage:
    """Looks at this process's device now and then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle, self._nvml = _nvml_handle(device)
        self._first = self._joules()
        self._busy: list[float] = []
        self._looked = 0.0

    def look(self) -> None:
        """Sample the utilisation, at most every two seconds. Nearly free."""
        now = time.monotonic()
        if self._handle is None or now - self._looked < SAMPLE_SECONDS:
            return
        self._looked = now
        try:
            self._busy.append(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        except self._nvml.NVMLError:
            return

    def _joules(self) -> float | None:
        if self._handle is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000  # since the driver began
        except self._nvml.NVMLError:  # older than Volta
            return None

    def used(self) -> Used:
        """What was used since the beginning."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        now, cuda = self._joules(), self._device.type == "cuda"
        return Used(
            process_bytes=peak if sys.platform == "darwin" else peak * 1024,
            device=f"{_uuid(self._device)}" if cuda else "",
            device_bytes=torch.cuda.max_memory_allocated(self._device) if cuda else None,
            joules=None if now is None or self._first is None else now - self._first,
            utilisation=sum(self._busy) / len(self._busy) if self._busy else None,
        )


def sum_of(used: Sequence[Used]) -> dict[str, float | None]:
    """The figures of all processes together, as starts.json has them. A figure that one device lacks is None."""
    devices = {each.device: each for each in used if each.device}.values()  # each once, whoever shares it
    joules = [each.joules for each in devices]
    busy = [each.utilisation for each in devices]
    memory = [each.device_bytes for each in devices]
    return {
        "process_peak_bytes": max(each.process_bytes for each in used),
        "device_peak_bytes": max((each for each in memory if each is not None), default=None),
        "device_joules": None if not joules or None in joules else sum(each for each in joules if each is not None),
        "device_utilisation": None if not busy or None in busy else sum(each or 0.0 for each in busy) / len(busy),
    }


def _nvml_handle(device: torch.device) -> tuple[Any, Any]:
    """The device as nvidia-ml-py knows it, and that module; None without them."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None, None
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(_uuid(device)), pynvml
    except pynvml.NVMLError:  # no driver, or a slice of a GPU
        return None, None


def _uuid(device: torch.device) -> str:
    """As nvidia-smi shows it: CUDA_VISIBLE_DEVICES changes a device's number, not this."""
    found = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"
