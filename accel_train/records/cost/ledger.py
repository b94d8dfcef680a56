"""Where the time of a run went, and what its processes and devices used: RUN/starts.json, an entry for each start.

The main process always is in one phase, so the phases of a start add up to its time. The file is rewritten every
two seconds, so a killed start is recorded up to at most two seconds before. The next start begins at a checkpoint: what
came after that in earlier starts has to be done again, and moves from its phase to "repeated".

Used are memory and, of NVIDIA's GPUs, utilisation and energy (nvidia-ml-py).
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from accel_train.launch.environment import Launch
from accel_train.records.directory import STATUS_SECONDS, RunDirectory
from accel_train.records.events import Event, Rewound, UpdateDone
from accel_train.untrusted import is_count, is_number, read_json_object

Item = TypeVar("Item")
Phase = Literal["starting", "training", "evaluating", "saving"]

FILE = "starts.json"
KEPT_SAVES = 100  # of this start: older checkpoints are deleted
KEPT_SAVES_BEFORE = 10  # of each start before it: the file is written anew every two seconds


@dataclass
class Start:
    """One start of the program. Times are seconds since 1970, of the main process's host."""

    began: float
    ended: float
    """When the entry was written last."""
    processes: int
    accelerators: int
    """Of them on a GPU or another accelerator."""
    first_update: int
    """Updates done when it began."""
    last_update: int
    finished: bool = False
    """Whether the run was finished then: what follows is no interruption."""
    starting: float = 0.0
    """Seconds from the start of the program to the end of the first update."""
    training: float = 0.0
    evaluating: float = 0.0
    saving: float = 0.0
    """Seconds for which training stood still for a save."""
    repeated: float = 0.0
    """Seconds of training and evaluation whose result was lost, and which were done again."""
    waiting: float = 0.0
    """Seconds of the training that were spent waiting for data."""
    saves: list[tuple[int, float, float, float]] = field(default_factory=list)
    """At each save: the update, and the seconds of training, evaluating and waiting until then."""
    usage: dict[str, float | None] = field(default_factory=dict)
    """What the processes and their devices used until the last end of an epoch: see `sum_of`."""

    def go_back(self, update: int) -> None:
        """Count what was done after the save of `update`, or of an earlier one, as done twice."""
        before = [save for save in self.saves if save[0] <= update]
        kept = before[-1] if before else (self.first_update, 0.0, 0.0, 0.0)
        lost = (max(0.0, self.training - kept[1]), max(0.0, self.evaluating - kept[2]))
        self.repeated += sum(lost)
        self.training -= lost[0]
        self.evaluating -= lost[1]
        self.waiting = min(self.waiting, kept[3])
        self.saves = before
        self.last_update = min(self.last_update, max(update, self.first_update))


class Ledger:
    """The entry of this start, and those of the starts before it. Only the main process writes."""

    def __init__(
        self, directory: RunDirectory, *, launch: Launch, on_cpu: bool, update: int, anew: bool = False
    ) -> None:
        """`update`: after which this start goes on. What earlier starts did after it is counted as done twice.

        `anew`: earlier starts in this folder were another run's.
        """
        self._directory = directory
        self.starts = read_starts(directory.path) if directory.writes and not anew else []
        self.processes_before = self.starts[-1].processes if self.starts else 0
        """Of the start before this one; 0 if this one is the first."""
        unfinished = [earlier.last_update for earlier in self.starts if not earlier.finished]
        self.repeated_updates = max([update, *unfinished]) - update
        """Updates that this start does again: at least, for a start that was killed wrote the file up to 2 s before."""
        for earlier in self.starts:
            if earlier.last_update >= update and not earlier.finished:  # also of a test that was not finished
                earlier.go_back(update)
            earlier.saves = earlier.saves[-KEPT_SAVES_BEFORE:]
        now, processes = time.time(), launch.world_size
        self.start = Start(launch.began, now, processes, 0 if on_cpu else processes, update, update)
        self.starts.append(self.start)
        self.start.starting = max(0.0, now - launch.began)  # the imports, above all
        self._phase: Phase = "starting"
        self._since = time.monotonic()
        self._written = -math.inf
        self.write()

    def enter(self, phase: Phase) -> None:
        """Begin a phase; the one before ends."""
        now = time.monotonic()
        setattr(self.start, self._phase, getattr(self.start, self._phase) + now - self._since)
        self._phase, self._since = phase, now

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Surround a phase that is not the training: then the phase before goes on."""
        before = self._phase
        self.enter(phase)
        self.write()
        try:
            yield
        finally:
            self.enter(before)

    def handle(self, event: Event) -> Sequence[str]:
        """Count an update, or that the run goes back. Phases begin and end by calls: an error ends them, too."""
        match event:
            case UpdateDone():
                if self._phase == "starting":
                    self.enter("training")
                self.start.last_update, self.start.waiting = event.update, event.waiting
                self.write()
            case Rewound():
                for start in self.starts:
                    if start.last_update > event.update:
                        start.go_back(event.update)
        return ()

    def ticking(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the same items, and write the entry in between."""
        for item in items:
            self.write()
            yield item

    def saved(self, update: int) -> None:
        """A save of `update` begins: what was done until now is not lost, if it succeeds."""
        self.enter(self._phase)
        start = self.start
        start.saves = [*start.saves, (update, start.training, start.evaluating, start.waiting)][-KEPT_SAVES:]

    def end(self, *, finished: bool) -> None:
        """Write the last entry."""
        self.start.finished = finished
        self.write(force=True)

    def write(self, *, force: bool = False) -> None:
        """Write the file, if it is older than two seconds or by `force`."""
        if not (self._directory.writes and (force or time.monotonic() - self._written >= STATUS_SECONDS)):
            return
        self.enter(self._phase)
        self._written, self.start.ended = time.monotonic(), time.time()
        self._directory.starts({"starts": [asdict(start) for start in self.starts]})


def read_starts(run: Path) -> list[Start]:
    """The starts of the run in a folder, from the first to the last; [] if the file is missing or damaged."""
    starts = read_json_object(run / FILE).get("starts")
    entries = starts if isinstance(starts, list) else []
    return [start for entry in entries if (start := _start(entry)) is not None]


def _start(entry: Any) -> Start | None:
    try:
        start = Start(**entry)
        start.saves = [(update, float(a), float(b), float(c)) for update, a, b, c in start.saves]
    except (TypeError, ValueError):
        return None
    counts = (start.processes, start.accelerators, start.first_update, start.last_update, *(s[0] for s in start.saves))
    times = (start.began, start.ended, start.starting, start.training, start.evaluating, start.saving, start.repeated)
    used = start.usage.values() if isinstance(start.usage, dict) else [math.nan]
    fits = all(map(is_count, counts)) and all(
        map(is_number, (*times, start.waiting, *(t for s in start.saves for t in s)))
    )
    return start if fits and all(value is None or is_number(value) for value in used) else None


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
            device=_uuid(self._device) if cuda else "",
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
