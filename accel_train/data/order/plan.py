"""Which samples when: a pure function of (seed, epoch, update), the same for every number of processes.

    batch_size = processes x accumulation x micro_batch

Update u of an epoch takes the positions u*batch_size … (u+1)*batch_size - 1 of that epoch's permutation of the
samples. They are cut into `accumulation` global micro-batches, and each of those into one contiguous slice a process
(Accelerate's `split_batches`). What lies behind the last sample is padding of weight 0: so all global micro-batches
are full, all processes take the same number of steps, and shapes never change. A sample that is left out because it
cannot be read becomes padding, too, in its own place.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_train.errors import UserError


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch become updates, global micro-batches and processes' slices."""

    samples: int  # of the training set
    batch_size: int  # of one update, over all processes
    processes: int
    accumulation: int  # global micro-batches an update
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.samples < self.batch_size:
            raise UserError(
                f"--batch-size: {self.batch_size} samples an update, but the training data has only {self.samples}; "
                f"choose a smaller batch."
            )

    @property
    def micro_batch(self) -> int:
        """Samples of one process in one forward pass."""
        return self.batch_size // (self.processes * self.accumulation)

    @property
    def updates_per_epoch(self) -> int:
        return self.updates_from(0)

    def updates_from(self, position: int) -> int:
        """How many updates of an epoch are left when its samples before `position` are done."""
        full, rest = divmod(self.samples - position, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def updates_until(self, epoch: int, position: int) -> int:
        """How many updates a run with this plan has done at `position` of epoch `epoch`."""
        return (epoch + 1) * self.updates_per_epoch - self.updates_from(position)

    def real_samples(self, position: int) -> int:
        """Samples in the window that begins at `position` of an epoch that are no padding."""
        return min(self.batch_size, self.samples - position)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.samples, self.updates_per_epoch * self.batch_size)


def accumulation_steps(batch_size: int, processes: int, micro_batch_size: int | None, *, pairs: bool = False) -> int:
    """The fewest micro-batches an update that hold at most `micro_batch_size` samples of each process.

    `pairs` asks for micro-batches of even size, for mixup and cutmix mix neighbours (see augment.py).
    Raises UserError, naming the nearest sizes, if the processes cannot share the batch.
    """
    step = 2 if pairs else 1
    unit = processes * step
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        near = f"{below} or {above}" if below else f"{above}"
        sharing = f"{processes} process{'es' * (processes > 1)}" + " in pairs, which mixup and cutmix mix" * pairs
        raise UserError(f"--batch-size: {batch_size} samples cannot be shared evenly by {sharing}; try {near}.")
    share = batch_size // processes
    limit = share if micro_batch_size is None else micro_batch_size
    fitting = [size for size in range(step, min(share, limit) + 1, step) if share % size == 0]
    if not fitting:
        raise UserError(f"--micro-batch-size: found {limit}, but mixup and cutmix mix pairs; choose at least 2.")
    return share // max(fitting)
