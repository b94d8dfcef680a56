"""Shards are fetched before they are needed, and removed in the order of their next use: the order is known.

A thread in one process of each node does both (Bélády 1966: to remove what is needed last is optimal). It only saves
time. A process that needs a shard which is not there fetches it itself.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from accelerate import Accelerator

from accel_train.data.order.samplers import IndexSampler, TrainingSampler
from accel_train.data.sources.remote.images import RemoteImages
from accel_train.data.sources.remote.shard_cache import FETCHES, ShardCache, size_text
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.errors import UserError

AHEAD = 2 * FETCHES
"""Shards before whose use others are removed to make room for them. The later that is decided, the fewer are fetched
again (Cao et al. 1995, doi.org/10.1145/223587.223608: prefetching and Bélády's rule disagree)."""
RETRY_SECONDS, FULL_SECONDS = 60.0, 0.5
"""After which a shard is fetched ahead again that could not be fetched (who needs it tries at once), or had no room."""
LOOK_SECONDS, ORDER_SECONDS = 0.1, 0.01
"""Between two looks at what is missing, and at what was trained, which may be removed."""
HELD = 2
"""Updates whose batches a `FollowedLoader` holds. Processes are never two updates apart, so what one has trained the
others have read."""
SOON = 4
"""Updates before its use at which a shard that could not be fetched ahead ends the run."""
LOST = "data that is lost ({})"
NEVER = 1 << 40  # a time in batches
Batches = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Uses:
    """When a pass over a split needs each shard, in batches from its beginning."""

    first: Batches
    """int64 [shards]; NEVER: not in this pass."""
    last: Batches
    """int64 [shards]; -NEVER: not in this pass."""
    length: int

    def most_at_once(self, sizes: Batches, margin: int) -> int:
        """The bytes of the shards that are in use at the same time, at most. `sizes`: in bytes, int64 [shards];
        `margin`: batches that a shard is needed before and after its uses."""
        used = self.last >= 0
        change = np.zeros(self.length + 2 * margin + 2, dtype=np.int64)
        np.add.at(change, np.maximum(self.first[used] - margin, 0), sizes[used])
        np.subtract.at(change, self.last[used] + margin + 1, sizes[used])
        return int(change.cumsum().max())


@dataclass(frozen=True)
class Pass:
    """A pass over a split, as far as this node is concerned."""

    sampler: IndexSampler
    shard_of: Batches
    """int64 [n], the shard of each sample."""
    part: slice
    """Which slices of a batch are those of this node's processes."""
    processes: int
    accumulation: int
    """Batches of an update."""

    def started(self) -> Pass:
        """The pass that begins where the sampler is now, for another thread: a sampler remembers its epoch."""
        return replace(self, sampler=copy.deepcopy(self.sampler))

    def at(self, epoch: int, position: int) -> Pass:
        """The pass of training that begins after `position` samples of `epoch`."""
        sampler = copy.copy(self.sampler)
        assert isinstance(sampler, TrainingSampler)
        sampler.seek(epoch, position)
        return replace(self, sampler=sampler)

    def rest(self, batch: int) -> list[Pass]:
        """What follows in a training after `batch` batches of this pass: the rest of its epoch, and the next one."""
        sampler = self.sampler
        assert isinstance(sampler, TrainingSampler)
        position = sampler.position + batch // self.accumulation * sampler.plan.batch_size
        return [self.at(sampler.epoch, min(position, sampler.plan.samples)), self.at(sampler.epoch + 1, 0)]

    def uses(self, shards: int) -> Uses:
        """When it needs each of `shards` shards."""
        first, last, batch, size = np.full(shards, NEVER), np.full(shards, -NEVER), 0, self.sampler.batch_size
        for block in self.sampler.blocks():
            batches = len(block) // size
            ids = block.ids.view(batches, self.processes, -1)[:, self.part].reshape(batches, -1).numpy()
            needed, when = self.shard_of[ids], np.broadcast_to(batch + np.arange(batches)[:, None], ids.shape)
            np.minimum.at(first, needed, when)
            np.maximum.at(last, needed, when)
            batch += batches
        return Uses(first, last, batch)


class FetchAhead:
    """The thread of a node, and what it knows of the future of one data.root. It ends with the loaders."""

    def __init__(self, cache: ShardCache, tars: tuple[str, ...]) -> None:
        self.cache, self.tars = cache, tars
        self.sizes = np.array([cache.size_of(tar) for tar in tars], dtype=np.int64)
        self.evaluations: list[Pass] = []
        """Those that are expected after each epoch."""
        self._here: tuple[Pass, int] | None = None  # the pass that goes on, and how many of its batches are done
        self._training: tuple[Pass, int] | None = None  # the same of the training, also while something is evaluated
        self._planned: Pass | None = None
        self._passes: list[Uses] = []
        self._capacity = 0
        self._start, self._began = 0, 0.0  # the batch and the time at which the plan begins
        self._written: Batches | None = None  # what `_order_removals` has written, so that only changes are
        self._fetching: set[int] = set()
        self._failed: dict[int, tuple[float, str]] = {}  # shard -> when it is tried again, and why it has failed
        self._full_until = self._next_look = 0.0
        self._looks = False  # whether the thread runs

    def at(self, which: Pass, batch: int) -> None:
        """Say that so many batches of this pass are done."""
        self._here = which, batch
        if isinstance(which.sampler, TrainingSampler):
            self._training = which, batch
        if not self._looks:
            self._looks = True
            threading.Thread(target=_keep_looking, args=(weakref.ref(self),), name="ahead", daemon=True).start()

    def look(self) -> None:
        """Fetch what is missing and will be needed first."""
        if self._here is None:
            return
        (which, batch), now = self._here, time.monotonic()
        if which is not self._planned:
            self._plan(which, batch)
        done = batch - self._start
        at = self._next_uses(done)
        self._order_removals(at)
        self._ask_to_stop((at - done <= SOON * which.accumulation) & (at >= self._passes[0].length))
        if now < max(self._full_until, self._next_look):
            return
        self._next_look = now + LOOK_SECONDS
        order = np.argsort(at, kind="stable")[: int((at < NEVER).sum())]
        order = order[self.sizes[order].cumsum() <= self._capacity]  # what comes after takes the room of one of these
        present = self.cache.names()
        near = AHEAD + int((at <= done).sum())
        for number, shard in enumerate(order.tolist()):
            if len(self._fetching) >= FETCHES:
                return
            is_missing = self.cache.path(self.tars[shard]).name not in present
            if is_missing and shard not in self._fetching and self._failed.get(shard, (0.0, ""))[0] < now:
                self._fetching.add(shard)
                worth, removes = self._began - int(at[shard]), number < near
                # Not a pool: at the program's end it would wait until all is fetched.
                threading.Thread(target=self._fetch, args=(shard, worth, removes), name="fetch", daemon=True).start()

    def _plan(self, which: Pass, batch: int) -> None:
        if isinstance(which.sampler, TrainingSampler):
            rest, following = which.rest(batch)
            coming = [rest, *self.evaluations, following]
        else:
            coming = [which, *(self._training[0].rest(self._training[1]) if self._training is not None else ())]
            batch = 0
        self._passes = [each.uses(len(self.tars)) for each in coming]
        self._capacity = self.cache.capacity() - self.cache.beside
        self._start, self._began, self._written, self._planned = batch, time.time(), None, which

    def _next_uses(self, done: int) -> Batches:
        """The batch of each shard's next use, counted from the plan's beginning over all passes, of which `done` are
        done; in use: of its first one. NEVER: not known."""
        at, start = np.full(len(self.tars), NEVER), 0
        for number, each in enumerate(self._passes):
            at = np.minimum(at, np.where(each.last >= (done if number == 0 else 0), start + each.first, NEVER))
            start += each.length
        return at

    def _order_removals(self, at: Batches) -> None:
        """Give the copies their times of change (see shard_cache.py): earlier the later they are needed. In a pass only
        those change that have had their last use in it."""
        changed = range(len(at)) if self._written is None else np.flatnonzero(at != self._written).tolist()
        for shard in changed:
            self.cache.set_worth(self.tars[shard], self._began - int(at[shard]) if at[shard] < NEVER else 0.0)
        if changed:
            self._written, self._full_until = at, 0.0

    def _ask_to_stop(self, is_soon: npt.NDArray[np.bool_]) -> None:
        """Let the run be saved while it can be, if a shard has failed that is needed soon after this pass: where the
        next one begins, no loader has looked ahead yet."""
        if (ask := self.cache.ask_to_stop) is not None:
            for shard, (_, reason) in list(self._failed.items()):
                if is_soon[shard]:
                    ask(LOST.format(reason.rstrip(".")))

    def _fetch(self, shard: int, worth: float, removes: bool) -> None:
        try:
            if not self.cache.fetch(self.tars[shard], worth, removes=removes):  # all that is there is needed earlier
                self._full_until = time.monotonic() + FULL_SECONDS
            self._failed.pop(shard, None)
        except UserError as error:
            self._failed[shard] = time.monotonic() + RETRY_SECONDS, str(error)
        finally:
            self._fetching.discard(shard)


def _keep_looking(ahead_of: weakref.ref[FetchAhead]) -> None:
    """The thread. It does not keep what it works for, and ends with it."""
    while (ahead := ahead_of()) is not None:
        with contextlib.suppress(OSError):  # somebody has removed the folder
            ahead.look()
        del ahead
        time.sleep(ORDER_SECONDS)


class FollowedLoader:
    """A loader of remote images that tells the thread how far it is, and looks ahead for images that are lost.

    All processes must stop at the same update, or some wait for ever. They agree on that at the end of an update, and
    stop at the end of the next one (run/stopping.py). So the batches of two updates are held here: a shard that cannot
    be fetched asks for the stop before it is needed.
    """

    def __init__(self, loader: Any, which: Pass, cache: ShardCache) -> None:
        self.loader, self._pass, self._cache = loader, which, cache

    def __iter__(self) -> Iterator[Any]:
        which, held, given, ahead = self._pass.started(), deque[Any](), 0, self._cache.ahead
        if ahead is not None:
            ahead.at(which, 0)
        for batch in self.loader:
            ask = self._cache.ask_to_stop
            if isinstance(batch, UserError) and given and ask is not None:
                ask(LOST.format(str(batch).rstrip(".")))
            held.append(batch)
            if len(held) > HELD * which.accumulation:
                yield held.popleft()
                given += 1
                if ahead is not None:
                    ahead.at(which, given)
        while held:
            yield held.popleft()

    def end(self) -> None:
        self.loader.end()


def follow(loader: Any, source: Source, sampler: IndexSampler, accelerator: Accelerator) -> Any:
    """The loader of `source`, whose shards are fetched ahead; the same one if it has no remote shards.

    Raises UserError if the node's cache has no room for what is in use at the same time.
    """
    images, ids = unwrap_subset(source)
    if not isinstance(images, RemoteImages):
        return loader
    first = accelerator.process_index - accelerator.local_process_index
    which = Pass(
        sampler,
        (images.shard_numbers if ids is None else images.shard_numbers[ids]).numpy(),
        slice(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        accelerator.num_processes,
        sampler.plan.accumulation if isinstance(sampler, TrainingSampler) else 1,
    )
    cache = images.cache
    if isinstance(sampler, TrainingSampler):
        _check_room(cache, images.tars, which)
    if accelerator.is_local_main_process:
        cache.ahead = cache.ahead or FetchAhead(cache, images.tars)
        if not isinstance(sampler, TrainingSampler) and not cache.ahead.evaluations:
            cache.ahead.evaluations = [which]  # of validation, or of the test if there is none
    return FollowedLoader(loader, which, cache)


def _check_room(cache: ShardCache, tars: tuple[str, ...], which: Pass) -> None:
    """Raise UserError if the cache is smaller than the shards that the first epoch uses at the same time: each batch
    would fetch shards again."""
    sizes = np.array([cache.size_of(tar) for tar in tars], dtype=np.int64)
    needed, total = which.uses(len(tars)).most_at_once(sizes, HELD * which.accumulation), int(sizes.sum())
    needed, total = needed + cache.beside, total + cache.beside
    if (capacity := cache.capacity()) < needed:
        where = "--data.cache-size" if cache.limit is not None else f"--data.cache-dir: {cache.folder} has room for"
        every = "all shards" if needed > 0.9 * total else f"shards of {size_text(needed)}"
        raise UserError(
            f"{where} {size_text(capacity)}: in this order batches come from {every} at a time, which "
            f"would be fetched again and again: give at least {size_text(needed)} (all shards: {size_text(total)})"
            f"{', or --data.order shards with few --data.open-shards' * (needed > 0.9 * total)}."
        )
