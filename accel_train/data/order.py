"""The order of samples: how an epoch is divided into updates, and which samples each batch has.

All of it is a pure function of (seed, epoch, update), for any number of processes. The slots of an update:

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

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from accel_train.config.checks import divisors
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.keyed import hashed, key, permuted, shift
from accel_train.task import task_of

Batch = TypeVar("Batch")

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
    (batch_transform.py), or virtual batches (models/batchnorm.py). `why`, for messages: "in pairs, as mixup and cutmix
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


# Batch samplers: which samples each batch has. Shuffled, drawn by class, or few shards at a time.


BLOCK = 1 << 15  # positions of one call: large enough to hide the overhead, small enough for memory


def block_size(batch_size: int) -> int:
    """The samples of a block: whole batches."""
    return max(1, BLOCK // batch_size) * batch_size


@dataclass(frozen=True)
class IndexBatch:
    """The sample numbers of a micro-batch, or of a slice of one. Samplers yield it; `workers.BatchDataset` loads it."""

    epoch: int
    ids: Tensor  # int64 [b]
    weights: Tensor  # float32 [b]: 1, or 0 for padding
    positions: Tensor | None = None
    """int64 [b], in the epoch, if it may have a sample more than once; None: it has each sample once."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> IndexBatch:
        positions = None if self.positions is None else self.positions[part]
        return IndexBatch(self.epoch, self.ids[part], self.weights[part], positions)

    def keys(self, seed: int) -> Tensor:
        """The word from which each sample's augmentation follows, int64 [b]: another one for each time that an epoch
        has the sample."""
        return hashed(key(seed, self.epoch, "augment"), self.ids if self.positions is None else self.positions)

    def draw_ids(self, keys: Tensor) -> Tensor:
        """What distinguishes each draw from all others of its update, int64 [b]: a sample that is drawn twice has one
        number, but two keys. `keys`: what the method `keys` returned."""
        return self.ids if self.positions is None else keys


@dataclass(frozen=True)
class UpdateSize:
    """How many samples an update has, over all processes."""

    covered: int
    """The positions of the epoch that the update takes."""
    samples: int
    """How many of these have a sample that can be read."""
    is_last: bool
    """Whether the epoch ends with this update, or the run within it."""


class IndexSampler(Sampler[IndexBatch], ABC):
    """A batch sampler that yields each global micro-batch as an IndexBatch."""

    batch_size: int
    """Samples of one batch, over all processes. Accelerate reads this and the next one."""
    drop_last = False  # all micro-batches are full
    virtual_batch = 2
    """Samples that are always computed together, one after the other: a batch has whole ones. 2: pairs."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def blocks(self) -> Iterator[IndexBatch]:
        """Yields the same samples in larger pieces, each of many whole batches, one after the other."""

    def __iter__(self) -> Iterator[IndexBatch]:
        for block in self.blocks():
            for start in range(0, len(block), self.batch_size):
                yield block[start : start + self.batch_size]


class TrainingSampler(IndexSampler):
    """Yields the global micro-batches of one epoch, from a given sample on.

    Accelerate gives each process its slice of each batch. `seek` sets the position. A loader's own epoch number is not
    used: Accelerate does not pass it on for every number of processes, and it says nothing of samples already done.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        unreadable: Tensor | None = None,
        draws: Draws | None = None,
        *,
        repeats: int = 1,
        samples: int | None = None,
        shards: ShardOrder | None = None,
    ) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places, also if samples are drawn.
        `draws`: which samples an epoch has; None: each sample once. `repeats`: how often each is in its update.
        `samples`: of the data; None: as many as an epoch has places (`epoch_length`). `shards`: the order, if it is
        not at random over all samples."""
        self.plan = plan
        self.seed = seed
        self.repeats, self.samples = repeats, plan.samples if samples is None else samples
        self.draws, self.shards = draws, shards
        self.unreadable = unreadable
        self.substitute = 0 if unreadable is None else int((~unreadable).nonzero()[0])  # a sample that can be read
        self.batch_size = plan.slots // plan.accumulation
        self.virtual_batch = plan.virtual_batch
        self.places = plan.places()
        self.filled = self.places >= 0
        self.epoch = 0
        self.position = 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """Start the next iteration after the first `position` samples of epoch `epoch`."""
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return self.plan.updates_left(self.epoch, self.position) * self.plan.accumulation

    def updates(self, batches: Iterator[Batch]) -> Iterator[tuple[UpdateSize, Iterator[Batch]]]:
        """Divide the micro-batches of an iteration into updates: yield the size of each, and its micro-batches.

        `batches` begins where `seek` has said. A micro-batch is fetched when it is requested. Take all of an update
        before the next one.
        """
        position = self.position
        size = self.size_at(position)
        for first in batches:
            # `iter` and `del`: else its memory would be kept until the update's end.
            micro_batches = chain(iter((first,)), islice(batches, self.plan.accumulation - 1))
            del first
            yield size, micro_batches
            position += size.covered
            size = self.size_at(position)

    def size_at(self, position: int) -> UpdateSize:
        """The size of the update that begins at `position` of the epoch."""
        covered = samples = self.plan.real_samples(position)
        if self.unreadable is not None:
            samples -= int(self.unreadable[self._ids(torch.arange(position, position + covered))].sum())
        return UpdateSize(covered, samples, is_last=self.plan.updates_left(self.epoch, position) == 1)

    def _ids(self, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch. This alone decides the order."""
        if self.repeats > 1:
            positions = positions // self.repeats
        if self.shards is not None:
            return self.shards.look_up(self.epoch, positions)
        places = permuted(positions, self.samples, key(self.seed, self.epoch, "order"))
        return places if self.draws is None else self.draws.of_epoch(self.epoch)[places]

    def _apart(self, starts: Tensor, places: Tensor) -> Tensor:
        """The positions at `places` of the updates that begin at `starts`: an update has first one copy of each of its
        samples, then the second copies, … So copies are not neighbours, which might be mixed, nor, where batches are
        large enough, in one virtual batch. (On several processes, RASampler has each copy on another one.)"""
        lengths = (self.plan.samples - starts).clamp(min=0, max=self.plan.batch_size)  # the last update may be shorter
        whole, rest = lengths // self.repeats, lengths % self.repeats
        longer = rest * (whole + 1)  # the places of the first copies, of which there is one more
        first = places < longer
        copy = torch.where(first, places // (whole + 1), rest + (places - longer) // whole.clamp(min=1))
        number = torch.where(first, places % (whole + 1), (places - longer) % whole.clamp(min=1))
        return torch.where((places >= 0) & (places < lengths), starts + number * self.repeats + copy, starts + places)

    def blocks(self) -> Iterator[IndexBatch]:
        plan, epoch = self.plan, self.epoch
        last = plan.updates_left(epoch, self.position) * plan.slots
        step = block_size(self.batch_size)
        for start in range(0, last, step):
            slots = torch.arange(start, min(start + step, last))
            places = self.places[slots % plan.slots]
            starts = self.position + slots // plan.slots * plan.batch_size
            positions = starts + places
            weights = (self.filled[slots % plan.slots] & (positions < plan.samples)).to(torch.float32)
            if self.repeats > 1:
                positions = self._apart(starts, places)
            # Padding repeats the first samples of the epoch, with weight 0; an empty slot has another sample.
            ids = self._ids(positions % plan.samples)
            if self.unreadable is not None:
                skipped = self.unreadable[ids]
                weights[skipped], ids[skipped] = 0.0, self.substitute
            repeated = self.draws is not None or self.repeats > 1
            yield IndexBatch(epoch, ids, weights, positions if repeated else None)


class EvaluationSampler(IndexSampler):
    """Yields every sample once, in stored order, padded to full batches."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def blocks(self) -> Iterator[IndexBatch]:
        last, step = len(self) * self.batch_size, block_size(self.batch_size)
        for start in range(0, last, step):
            positions = torch.arange(start, min(start + step, last))
            yield IndexBatch(0, positions % self.samples, (positions < self.samples).to(torch.float32))


# Which samples an epoch draws with --data.sampler balanced.
#
# An epoch has as many draws as training samples. This is systematic sampling: each sample is an interval on a line, as
# long as one divided by the size of its class, and the draws are equally spaced points, the first one at random. So
# the number of draws of a sample is proportional to this length, rounded up or down. The intervals of a class are
# adjacent, so the same holds for classes; within a class the order is shuffled in each epoch.
#
# All of it is a pure function of (seed, epoch) and the labels.


DRAWN_BLOCK = 1 << 20  # samples permuted in one call, for memory


class Draws:
    """The samples that each epoch draws: each class equally often."""

    def __init__(self, seed: int, labels: Tensor) -> None:
        """`labels`: int64 [n], the class of each sample."""
        self.seed, self.labels = seed, labels
        weights = 1 / labels.bincount().double()[labels]
        self.weights = weights / weights.max()
        self._epoch, self._drawn = -1, labels

    def of_epoch(self, epoch: int) -> Tensor:
        """The sample of each draw, int64 [n], one class after the other."""
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        return self._drawn

    def _draw(self, epoch: int) -> Tensor:
        count = len(self.labels)
        word = key(self.seed, epoch, "place")
        starts = range(0, count, DRAWN_BLOCK)
        line = torch.cat([permuted(torch.arange(i, min(i + DRAWN_BLOCK, count)), count, word) for i in starts])
        line = line[self.labels[line].argsort(stable=True)]
        ends = self.weights[line].cumsum(0)
        first = _uniform(torch.tensor(key(self.seed, epoch, "first draw")))
        points = (torch.arange(count) + first) * (ends[-1] / count)
        return line[torch.searchsorted(ends, points, right=True).clamp_(max=count - 1)]  # a sum of floats is rounded

    def digest(self) -> str:
        """The SHA-256 of the labels, by which processes compare their draws."""
        return hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()


def _uniform(keys: Tensor) -> Tensor:
    """A number in [0, 1) for each key, float64 with 53 random bits."""
    return shift(keys, 11).to(torch.float64) * 2.0**-53


def create_draws(config: Config, labels: Tensor) -> Draws | None:
    """What an epoch draws; None: each sample once. `labels`: see `Source.labels`. Raises UserError if images may have
    several labels: then they have no class."""
    if config.data.sampler == "shuffle":
        return None
    task_of(labels).check_one_label("--data.sampler balanced", "use shuffle.")
    return Draws(config.seed, labels)


# An order that needs few shards at a time (--data.order shards): a pure function of (seed, epoch, position).
#
# In each epoch the shards are permuted, and taken in blocks of at most K (--data.open-shards); the samples of a block
# are permuted. So an update has samples of one block, or of two where one ends. K is in the recipe: the order does not
# depend on the processes. Only a table of the shards is kept, and the order of any samples is computed from it.


def shard_bounds(numbers: Tensor) -> Tensor:
    """int64 [shards + 1] for samples that are in the shards `numbers`, int64 [n]: shard i has the samples
    bounds[i] … bounds[i + 1] - 1. If samples of others are between those of a shard, each part counts as a shard."""
    first = torch.ones(len(numbers), dtype=torch.bool)
    first[1:] = numbers[1:] != numbers[:-1]
    return torch.cat([first.nonzero()[:, 0], torch.tensor([len(numbers)])])


class ShardOrder:
    """The order of the epochs of a run with --data.order shards."""

    def __init__(self, bounds: Tensor, *, seed: int, open_shards: int) -> None:
        """`bounds`: of `shard_bounds`; `open_shards`: of one block, at most."""
        self.bounds, self.seed = bounds, seed
        shards = len(bounds) - 1
        blocks = -(-shards // open_shards)  # equal ones: a last one of one shard would mix nothing
        self.blocks = torch.arange(blocks + 1) * shards // blocks
        """int64 [blocks + 1]: which of the permuted shards each block has."""

    def look_up(self, epoch: int, positions: Tensor) -> Tensor:
        """The samples at `positions` (int64 [n]) of the epoch, int64 [n]."""
        count = len(self.bounds) - 1
        shards = permuted(torch.arange(count), count, key(self.seed, epoch, "shards"))
        sizes = self.bounds.diff()[shards]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])  # of the shards, one after the other
        places = positions.clone()
        blocks = torch.searchsorted(starts[self.blocks], positions, right=True) - 1
        for block in sorted({*blocks.tolist()}):
            start, end = starts[self.blocks[block : block + 2]].tolist()
            inside = blocks == block
            word = key(self.seed, epoch, "block", block)
            places[inside] = start + permuted(positions[inside] - start, end - start, word)
        found = torch.searchsorted(starts, places, right=True) - 1
        return self.bounds[shards[found]] + places - starts[found]
