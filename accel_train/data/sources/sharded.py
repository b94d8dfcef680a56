"""The order of the training samples of data that is in shards (--data.order shards)."""

from __future__ import annotations

import torch

from accel_train.config.schema import Config, Data
from accel_train.data.order.drawing import create_draws
from accel_train.data.order.plan import Plan
from accel_train.data.order.shards import ShardOrder, ShardSampler, ShardTable
from accel_train.data.sources.splits import Source, Splits, unwrap_subset
from accel_train.errors import UserError
from accel_train.user_code.reference import short_name


def shard_table(data: Data, source: Source) -> ShardTable:
    """Which samples of `source` are in which shard. Raises UserError if the data has no shards.

    A source has some if it has `shard_numbers`: int64 [n], the number of the shard of each sample.
    """
    held, ids = unwrap_subset(source)
    numbers: torch.Tensor | None = getattr(held, "shard_numbers", None)
    if numbers is None:
        raise UserError(
            f"--data.order shards: the images of '{short_name('data.name', data.name)}' are not in shards; write them "
            "with `accel-train shards` and give --data.name wds (docs/large_data.md), or use --data.order full."
        )
    return ShardTable.of(numbers if ids is None else numbers[ids])


def create_shard_sampler(config: Config, splits: Splits, plan: Plan) -> ShardSampler:
    """Raises UserError if the training data has no shards."""
    order = ShardOrder(
        shard_table(config.data, splits.train),
        plan,
        seed=config.seed,
        open_shards=config.data.open_shards,
        repeats=config.data.repeats,
        draws=create_draws(config, splits.train.labels, splits.train_weights),
    )
    return ShardSampler(plan, order, splits.unreadable)
