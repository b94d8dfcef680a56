"""How an epoch is divided into updates: a pure function of (seed, epoch, update) for any number of processes.

    batch_size = processes x accumulation x micro_batch

Update u of an epoch takes the positions u*batch_size … (u+1)*batch_size - 1 of that epoch's permutation of the
samples. They are divided into `accumulation` global micro-batches, and each of those into one contiguous slice per
process (Accelerate's `split_batches`). Positions after the last sample are padding of weight 0: so all global
micro-batches are full, all processes take the same number of steps, and shapes never change. A sample that is skipped
because it cannot be read also becomes padding, in its own place.
"""

from __future__ import annotations

from dataclasses import dataclass

from accel_train.errors import UserError


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are divided into updates, global micro-batches and slices of processes."""

    samples: int  # of the training set
    batch_size: int  # of one update, over all processes
    processes: int
    accumulation: int  # global micro-batches of one update
    drop_last: bool = False

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


def accumulation_steps(batch_size: int, processes: int, micro_batch_size: int | None, *, pairs: bool = False) -> int:
    """The smallest number of micro-batches per update with at most `micro_batch_size` samples of each process.

    With `pairs`, micro-batches have an even size, because mixup and cutmix mix neighbours (transforms/batch.py).
    Raises UserError, with the nearest possible sizes, if the batch cannot be divided evenly among the processes.
    """
    step = 2 if pairs else 1
    unit = processes * step
    if batch_size % unit:
        below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
        near = f"{below} or {above}" if below else f"{above}"
        sharing = f"{processes} process{'es' * (processes > 1)}" + " in pairs, as mixup and cutmix need" * pairs
        raise UserError(
            f"--batch-size: found {batch_size}, which cannot be divided evenly among {sharing}; try {near}."
        )
    share = batch_size // processes
    limit = share if micro_batch_size is None else micro_batch_size
    fitting = [size for size in range(step, min(share, limit) + 1, step) if share % size == 0]
    if not fitting:
        raise UserError(
            f"--micro-batch-size: found {limit}, but mixup and cutmix mix pairs of samples; choose 2 or more."
        )
    return share // max(fitting)
