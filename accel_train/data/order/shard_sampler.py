"""The batch sampler of --data.order shards."""

from __future__ import annotations

import torch
from torch import Tensor

from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import TrainingSampler
from accel_train.data.order.shards import ShardOrder


class ShardSampler(TrainingSampler):
    """A TrainingSampler in the order of a ShardOrder.

    What has weight 0 and is loaded all the same is a sample of the shards that the process has open: else each
    process would fetch the shards of the first samples once more for an epoch's last update.
    """

    def __init__(self, plan: Plan, order: ShardOrder, unreadable: Tensor | None = None) -> None:
        """`unreadable`: bool [samples], the samples to skip. All others keep their places, also if samples are drawn:
        another sample in their place would move the samples after it into other shards."""
        super().__init__(plan, order.seed, unreadable, repeats=order.repeats, samples=len(order))
        self.order, self.draws, self.window = order, order.draws, order.width
        self.readable = torch.empty(0) if unreadable is None else (~unreadable).nonzero()[:, 0]
        owner = torch.arange(plan.slots) // plan.micro_batch % plan.processes
        first = torch.tensor([plan.places_of(each).start for each in range(plan.processes)])
        self.places = torch.where(self.filled, self.places, first[owner])

    def _ids(self, positions: Tensor) -> Tensor:
        return self.order.look_up(self.epoch, positions)

    def _instead(self, positions: Tensor) -> Tensor:
        """Padding has the sample of its place in the update before."""
        return torch.where(positions < self.plan.samples, positions, positions - self.plan.batch_size)

    def _substitutes(self, ids: Tensor) -> Tensor:
        return self.order.substitutes(ids, self.readable)
