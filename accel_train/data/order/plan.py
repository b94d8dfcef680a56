"""How an epoch is divided into updates: a pure function of (seed, epoch, update) for any number of processes.

    batch_size = processes x accumulation x micro_batch

Update u of an epoch takes the positions u*batch_size … (u+1)*batch_size - 1 of that epoch's permutation of the
samples. They are divided into `accumulation` global micro-batches, and each of those into one contiguous slice per
process (Accelerate's `split_batches`), which is a whole number of virtual batches. Positions after the last sample are
padding of weight 0: so all global micro-batches are full, all processes take the same number of steps, and shapes never
change. A sample that is skipped because it cannot be read also becomes padding, in its own place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_train.config.schema import Config
from accel_train.errors import UserError


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are divided into updates, global micro-batches and slices of processes."""

    samples: int  # of the training set
    batch_size: int  # of one update, over all processes
    processes: int
    accumulation: int  # global micro-batches of one update
    drop_last: bool = False
    virtual_batch: int = 1  # samples that are always computed together

    def __post_init__(self) -> None:
        if self.samples < self.batch_size:
            raise UserError(
                f"--batch-size: found {self.batch_size}, but the training data has only {self.samples} samples; "
                f"choose a smaller batch size."
            )

    @property
    def micro_batch(self) -> int:
        """Samples of one process in one forward pass."""
        return self.batch_size // (self.processes * self.accumulation)

    @property
    def micro_batch_sizes(self) -> list[int]:
        """What `micro_batch` can be, in increasing order."""
        return micro_batch_sizes(self.batch_size, self.processes, self.virtual_batch)

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

    def real_samples(self, position: int) -> int:
        """Number of samples, without padding, in the window that begins at `position` of an epoch."""
        return min(self.batch_size, self.samples - position)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.samples, self.updates_per_epoch * self.batch_size)


def virtual_batch_size(batch_size: int, *, batchnorm: bool, pairs: bool) -> int:
    """The size of virtual batches for an update of `batch_size` samples: it does not depend on the processes.

    The divisor of the batch size that is nearest to an eighth of it, so that the eight GPUs of a node can share an
    update; but nearest to 32 if an eighth is more, and to 16 if it is less and the model has a BatchNorm, whose
    statistics are too noisy over fewer samples (Wu and He 2018, arxiv.org/abs/1803.08494, table 2). With `pairs` an
    even one, because mixup and cutmix mix neighbours.
    """
    wanted = max(16 if batchnorm else 1, min(32, batch_size / 8))
    step = 2 if pairs else 1
    sizes = [size for size in range(step, batch_size + 1, step) if batch_size % size == 0]
    return min(sizes or [batch_size], key=lambda size: (abs(math.log(size / wanted)), -size))


def accumulation_steps(
    batch_size: int,
    processes: int,
    micro_batch_size: int | None,
    *,
    unit: int = 1,
    why: str = "",
    virtual: bool = False,
) -> int:
    """The smallest number of micro-batches per update with at most `micro_batch_size` samples of each process.

    A micro-batch is a whole number of units of `unit` samples: pairs, because mixup and cutmix mix neighbours
    (transforms/batch.py), or virtual batches (models/batchnorm/). For messages: `why` ("in pairs, as mixup and cutmix
    need"), and whether --virtual-batch-size may change (`virtual`). Raises UserError, with the nearest possible sizes,
    if the batch cannot be divided evenly.
    """
    if batch_size % (processes * unit):
        step = processes * unit
        below, above = batch_size // step * step, -(-batch_size // step) * step
        near = f"{below} or {above}" if below else f"{above}"
        sharing = f"{processes} process{'es' * (processes > 1)}" + f" {why}" * bool(why)
        smaller = [size for size in range(2, unit) if batch_size % (processes * size) == 0 and batch_size % size == 0]
        other = f", or --virtual-batch-size {smaller[-1]}, which trains another model" if virtual and smaller else ""
        raise UserError(
            f"--batch-size: found {batch_size}, which cannot be divided evenly among {sharing}; try {near}{other}."
        )
    share = batch_size // processes
    limit = share if micro_batch_size is None else micro_batch_size
    fitting = [size for size in micro_batch_sizes(batch_size, processes, unit) if size <= limit]
    if not fitting:
        raise UserError(f"--micro-batch-size: found {limit}, but samples are computed {why}; choose {unit} or more.")
    return share // max(fitting)


def micro_batch_sizes(batch_size: int, processes: int, unit: int) -> list[int]:
    """Return the possible numbers of samples in a micro-batch of one process, in increasing order.

    The batch can be shared by the processes in units of `unit` samples.
    """
    share = batch_size // processes
    return [size for size in range(unit, share + 1, unit) if share % size == 0]


def mixes_samples(config: Config) -> bool:
    """Whether neighbouring samples are mixed in pairs."""
    return config.augment.mixup > 0 or config.augment.cutmix > 0


def divide_batch(config: Config, processes: int, *, batchnorm: bool) -> tuple[int, int]:
    """How an update's batch is divided: (samples of a virtual batch, micro-batches of each process).

    `batchnorm`: whether the model has BatchNorms that count over virtual batches. If nothing depends on virtual
    batches, they are single samples, or the pairs that are mixed. With micro_batch_size "auto" there is
    no limit here: the size that fits is found later. Raises UserError if the batch cannot be divided.
    """
    mixes = mixes_samples(config)
    unit, why = (2, "in pairs, as mixup and cutmix need") if mixes else (1, "")
    size = config.virtual_batch_size
    if size is None and (batchnorm or config.bitwise):
        size = virtual_batch_size(config.batch_size, batchnorm=batchnorm, pairs=mixes)
    if size is not None:
        unit, why = size, f"in virtual batches of {size}" + ", over which BatchNorm counts" * batchnorm
    # Bitwise, each forward pass has one virtual batch: another shape could choose another kernel.
    limit = None if config.micro_batch_size == "auto" else config.micro_batch_size
    if config.bitwise and (limit or unit) >= unit:
        limit = unit
    return unit, accumulation_steps(config.batch_size, processes, limit, unit=unit, why=why, virtual=size is not None)
