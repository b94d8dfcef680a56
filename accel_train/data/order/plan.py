"""How an epoch is divided into updates: a pure function of (seed, epoch, update) for any number of processes.

    slots = processes x accumulation x micro_batch >= batch_size

Update u of an epoch takes the positions u*batch_size … (u+1)*batch_size - 1 of that epoch's permutation of the
samples. They are divided into units: virtual batches, mixed pairs or single samples. The units are dealt to the
processes as evenly as possible. A process computes its units in `accumulation` micro-batches; the global micro-batches
have one contiguous slice per process (Accelerate's `split_batches`). Where a process has one unit fewer than others,
its last slots are empty: a whole unit of weight 0. Positions after the last sample are padding of weight 0, too: so
all processes take the same number of steps, and shapes never change. A sample that is skipped because it cannot be read
also becomes padding, in its own place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from accel_train.config.checks import divisors
from accel_train.config.schema import Config
from accel_train.errors import UserError

WASTE = 0.25  # of the slots: if more are empty, the user is told
NO_END = 2**62  # updates of a run that somebody else ends


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are divided into updates, global micro-batches and slices of processes."""

    samples: int  # of the training set
    batch_size: int  # of one update, over all processes
    processes: int
    accumulation: int  # global micro-batches of one update
    drop_last: bool = False
    virtual_batch: int = 1  # samples that are always computed together: a unit
    updates: int = NO_END  # of the whole run

    def __post_init__(self) -> None:
        if self.samples < self.batch_size:
            raise UserError(
                f"--batch-size: found {self.batch_size}, but the training data has only {self.samples} samples; "
                f"choose a smaller batch size."
            )

    @property
    def micro_batch(self) -> int:
        """Slots for samples of one process in one forward pass."""
        return self.share // self.accumulation

    @property
    def share(self) -> int:
        """Slots of one process in one update."""
        return share(self.batch_size, self.processes, self.virtual_batch)

    @property
    def slots(self) -> int:
        """Of one update, over all processes."""
        return self.processes * self.share

    def places(self) -> Tensor:
        """For each slot the place of its sample in the update; -1: it is empty. int64 [slots], in the order of the
        global micro-batches."""
        unit, each = self.virtual_batch, self.share // self.virtual_batch  # each: units of a process, at most
        own = torch.arange(each).view(self.accumulation, 1, -1)  # which of its units a process computes when
        dealt = torch.tensor([self.units_of(process) for process in range(self.processes)])
        filled = own < dealt.view(1, -1, 1)
        number = filled.flatten().cumsum(0).view(filled.shape) - 1
        return torch.where(filled[..., None], number[..., None] * unit + torch.arange(unit), -1).flatten()

    def units_of(self, process: int) -> int:
        """Units of an update that `process` computes."""
        some, rest = divmod(self.virtual_batches, self.processes)
        return some + (process < rest)

    def is_empty(self, process: int, number: int) -> bool:
        """Whether micro-batch `number` of an update has only empty slots for `process`."""
        return number * self.micro_batch >= self.units_of(process) * self.virtual_batch

    @property
    def division(self) -> str:
        """How an update is shared: "256 of 288 slots = 3 processes x 1 accumulation x 96 images in virtual
        batches of 32 (11% of the slots are empty)"."""
        world = f"{self.processes} process{'es' * (self.processes > 1)}"
        slots = f" of {self.slots} slots" if self.empty else ""
        text = f"{self.batch_size}{slots} = {world} x {self.accumulation} accumulation x {self.micro_batch} images"
        text += f" in virtual batches of {self.virtual_batch}" * (self.virtual_batch > 2)
        return text + f" ({self.empty:.0%} of the slots are empty)" * (self.empty > 0)

    @cached_property
    def empty(self) -> float:
        """The share of an update's slots that are empty because the units cannot be dealt evenly, 0 to 1."""
        return 1 - self.batch_size / self.slots

    @property
    def even_processes(self) -> list[int]:
        """The numbers of processes that can share an update evenly, in increasing order."""
        return [count for count in range(1, self.virtual_batches + 1) if self.virtual_batches % count == 0]

    def warnings(self) -> tuple[str, ...]:
        """For the user, if many slots are empty: the time that they take is lost."""
        if self.empty <= WASTE:
            return ()
        step = self.processes * self.virtual_batch
        below, above = self.batch_size // step * step, -(-self.batch_size // step) * step
        sizes = f"--batch-size {below} or {above}" if below else f"--batch-size {above}"
        numbers = self.even_processes
        near = [max(n for n in numbers if n <= self.processes), *(n for n in numbers if n > self.processes)][:2]
        return (
            f"batch: {self.division}. Nothing would be empty with {' or '.join(map(str, near))} processes, or with "
            f"{sizes}, which trains another model.",
        )

    @property
    def micro_batch_sizes(self) -> list[int]:
        """What `micro_batch` can be, in increasing order."""
        return micro_batch_sizes(self.share, self.virtual_batch)

    @property
    def virtual_batches(self) -> int:
        """Of one update, over all processes."""
        return self.batch_size // self.virtual_batch

    @property
    def updates_per_epoch(self) -> int:
        return self.updates_from(0)

    def updates_from(self, position: int) -> int:
        """Number of updates left in an epoch whose samples before `position` are done."""
        full, rest = divmod(self.samples - position, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def updates_until(self, epoch: int, position: int) -> int:
        """Number of updates that a run with this plan has done at `position` of epoch `epoch`."""
        return (epoch + 1) * self.updates_per_epoch - self.updates_from(position)

    def updates_left(self, epoch: int, position: int) -> int:
        """Number of updates from `position` of epoch `epoch` until the epoch ends, or the run within it."""
        return min(self.updates_from(position), max(0, self.updates - self.updates_until(epoch, position)))

    def is_end(self, epoch: int, position: int) -> bool:
        """Whether the run's last update ends at `position` of epoch `epoch`, or ended before it."""
        return self.updates_until(epoch, position) >= self.updates

    def epochs_until(self, epoch: int, position: int) -> float:
        """Number of epochs that are done at `position` of epoch `epoch`, to four decimals: an int if they are whole."""
        part = round(1 - self.updates_from(position) / self.updates_per_epoch, 4) if position else 0
        return epoch + (part if 0 < part < 1 else int(part))

    def real_samples(self, position: int) -> int:
        """Number of samples, without padding, in the update that begins at `position` of an epoch."""
        return min(self.batch_size, self.samples - position)


def epoch_length(samples: int, repeats: int) -> int:
    """How many places an epoch has. With repeated augmentation as many as with torchvision's RASampler and timm's
    RepeatAugSampler: the number of samples, rounded down to a multiple of 256 (if it is not less)."""
    return samples if repeats == 1 or samples < 256 else samples // 256 * 256


def create_plan(config: Config, samples: int, processes: int, accumulation: int, virtual_batch: int) -> Plan:
    """The plan of a run with `samples` training samples. Raises UserError if they are fewer than a batch."""
    samples = epoch_length(samples, config.data.repeats)
    plan = Plan(samples, config.batch_size, processes, accumulation, config.data.drop_last, virtual_batch)
    # A fraction of an epoch has the nearest number of updates, a run at least one.
    updates = max(1, round(config.epochs * plan.updates_per_epoch))
    updates = min(updates, config.stop.updates or updates)
    return replace(plan, updates=updates)


def virtual_batch_size(batch_size: int, *, batchnorm: bool, pairs: bool) -> int:
    """The size of virtual batches for an update of `batch_size` samples: it does not depend on the processes.

    The divisor of the batch size that is nearest to an eighth of it, so that the eight GPUs of a node can share an
    update; but nearest to 32 if an eighth is more, and to 16 if it is less and the model has a BatchNorm, whose
    statistics are too noisy over fewer samples (Wu and He 2018, arxiv.org/abs/1803.08494, table 2). With `pairs` an
    even one, because mixup and cutmix mix neighbours.
    """
    wanted = max(16 if batchnorm else 1, min(32, batch_size / 8))
    step = 2 if pairs else 1
    sizes = [size for size in divisors(batch_size) if size % step == 0]
    return min(sizes or [batch_size], key=lambda size: (abs(math.log(size / wanted)), -size))


def accumulation_steps(
    batch_size: int, processes: int, micro_batch_size: int | None, *, unit: int = 1, why: str = ""
) -> int:
    """The smallest number of micro-batches per update with at most `micro_batch_size` samples of each process.

    A micro-batch is a whole number of units of `unit` samples: pairs, because mixup and cutmix mix neighbours
    (transforms/batch.py), or virtual batches (models/batchnorm.py). `why`, for messages: "in pairs, as mixup and cutmix
    need". Raises UserError if the batch is no whole number of units, or if there are fewer units than processes.
    """
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(f"--batch-size: found {batch_size}, which cannot be divided {why}; try {near}.")
    if batch_size // unit < processes:
        most = batch_size // unit
        raise UserError(
            f"--batch-size: found {batch_size}, which {processes} processes cannot share{f' {why}' * bool(why)}: some "
            f"would never have work. Use at most {most} process{'es' * (most > 1)}, or --batch-size "
            f"{unit * processes}, which trains another model."
        )
    slots = share(batch_size, processes, unit)
    limit = slots if micro_batch_size is None else micro_batch_size
    fitting = [size for size in micro_batch_sizes(slots, unit) if size <= limit]
    if not fitting:
        raise UserError(f"--micro-batch-size: found {limit}, but samples are computed {why}; choose {unit} or more.")
    return slots // max(fitting)


def share(batch_size: int, processes: int, unit: int) -> int:
    """Slots for samples of each process in one update: as many as the units need that one process has at most."""
    return -(-(batch_size // unit) // processes) * unit


def micro_batch_sizes(share: int, unit: int) -> list[int]:
    """Return the possible numbers of slots in a micro-batch of one process, in increasing order.

    `share`: of a process in an update. All micro-batches have the same size, so only few of its slots are empty: those
    of one unit at most.
    """
    return [unit * units for units in divisors(share // unit)]


def divide_batch(config: Config, processes: int, *, batchnorm: bool, apart: bool = False) -> tuple[int, int]:
    """How an update's batch is divided: (samples of a virtual batch, micro-batches of each process).

    `batchnorm`: whether the model has BatchNorms that count over virtual batches. `apart`: each forward pass must have
    one virtual batch (models/trial.py), which is as large as for a BatchNorm. If nothing depends on virtual
    batches (mix_mode batch does), they are single samples, or the pairs that are mixed. Raises UserError if the batch
    cannot be divided.
    """
    mixes = config.augment.mixes
    unit, why = (2, "in pairs, as mixup and cutmix need") if mixes else (1, "")
    size = config.virtual_batch_size
    together = mixes and config.augment.mix_mode == "batch"
    if size is None and (batchnorm or config.bitwise or together or apart):
        size = virtual_batch_size(config.batch_size, batchnorm=batchnorm or (apart and not config.bitwise), pairs=mixes)
    if size is not None:
        unit, why = size, f"in virtual batches of {size}" + ", over which BatchNorm counts" * batchnorm
        why += ", which are mixed together" * (together and not batchnorm)
    # Bitwise, each forward pass has one virtual batch: another shape could choose another kernel.
    limit = config.micro_batch_size
    if (config.bitwise or apart) and (limit or unit) >= unit:
        limit = unit
    return unit, accumulation_steps(config.batch_size, processes, limit, unit=unit, why=why)
