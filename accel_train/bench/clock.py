"""Time of work on a device, which goes on after the host has handed it over."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Seconds from when the device had done all before `start` until it has done all before `stop`."""

    def __init__(self, device: torch.device, meet: Callable[[], object] = lambda: None) -> None:
        """`meet` waits for all processes whose work is measured: then the last one counts."""
        self.device, self.meet = device, meet
        self._since = 0.0

    def start(self) -> None:
        self._wait()
        self._since = time.perf_counter()

    def stop(self) -> float:
        """Seconds since `start`."""
        self._wait()
        return time.perf_counter() - self._since

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self.meet()
