"""Which samples an epoch draws if classes or samples have weights (--data.sampler).

An epoch has as many draws as training samples. This is systematic sampling: each sample is an interval on a line, as
long as its weight, and the draws are equally spaced points, the first one at random. So the number of draws of a sample
is proportional to its weight, rounded up or down. The intervals of a class are adjacent, so the same holds for classes;
within a class the order is shuffled in each epoch.

All of it is a pure function of (seed, epoch), the labels and the weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.keyed import hashed, key, permuted, shift

BLOCK = 1 << 20  # samples permuted in one call, for memory


class Draws:
    """The samples that each epoch draws."""

    def __init__(self, seed: int, classes: Tensor, weights: Tensor, unreadable: Tensor | None = None) -> None:
        """`classes`: int64 [n] of each sample; `weights`: float64 [n], not negative, not all 0; `unreadable`: bool [n].

        A draw of an unreadable sample becomes one of another sample of its class, and all other draws stay the same. So
        an image can be skipped from the middle of a run on.
        """
        self.seed, self.classes, self.weights = seed, classes, weights / weights.max()
        self.candidates = self.weights.nonzero()[:, 0]  # sample numbers
        self.unreadable = unreadable
        self._epoch, self._drawn = -1, self.candidates
        if unreadable is not None:
            readable = self.candidates[~unreadable[self.candidates]]
            self.substitutes = readable[classes[readable].argsort(stable=True)]
            self.substitute_ends = self.weights[self.substitutes].cumsum(0)

    def of_epoch(self, epoch: int) -> Tensor:
        """The sample of each draw, int64 [n], one class after the other."""
        if epoch != self._epoch:
            self._epoch, self._drawn = epoch, self._draw(epoch)
        return self._drawn

    def _draw(self, epoch: int) -> Tensor:
        count, draws = len(self.candidates), len(self.weights)
        word = key(self.seed, epoch, "place")
        places = [permuted(torch.arange(i, min(i + BLOCK, count)), count, word) for i in range(0, count, BLOCK)]
        line = self.candidates[torch.cat(places)]
        line = line[self.classes[line].argsort(stable=True)]
        ends = self.weights[line].cumsum(0)
        first = _uniform(torch.tensor(key(self.seed, epoch, "first draw")))
        points = (torch.arange(draws) + first) * (ends[-1] / draws)
        drawn = line[torch.searchsorted(ends, points, right=True).clamp_(max=count - 1)]  # a sum of floats is rounded
        if self.unreadable is not None:
            lost = self.unreadable[drawn].nonzero()[:, 0]
            drawn[lost] = self._substitute(self.classes[drawn[lost]], hashed(key(self.seed, epoch, "substitute"), lost))
        return drawn

    def _substitute(self, classes: Tensor, keys: Tensor) -> Tensor:
        """A readable sample for each of these `classes`, by the weights; of any class if the class has none."""
        ends = torch.cat([torch.zeros(1, dtype=torch.float64), self.substitute_ends])
        of_substitutes = self.classes[self.substitutes]
        low = ends[torch.searchsorted(of_substitutes, classes)]
        high = ends[torch.searchsorted(of_substitutes, classes, right=True)]
        low, high = torch.where(high > low, low, 0.0), torch.where(high > low, high, ends[-1])
        points = low + _uniform(keys) * (high - low)
        places = torch.searchsorted(self.substitute_ends, points, right=True)
        return self.substitutes[places.clamp_(max=len(self.substitutes) - 1)]


def _uniform(keys: Tensor) -> Tensor:
    """A number in [0, 1) for each key, float64 with 53 random bits."""
    return shift(keys, 11).to(torch.float64) * 2.0**-53


def sample_weights(config: Config, labels: Tensor, weights: Tensor | None, unreadable: Tensor | None = None) -> Tensor:
    """How often --data.sampler, unless it is shuffle, draws each training sample, relative to the others: float64 [n].

    `labels`: see `Source.labels`; `weights`: those of the data, see `Splits.train_weights`. Raises UserError if they do
    not fit the option.
    """
    option = f"--data.sampler {config.data.sampler}"
    if config.data.sampler == "balanced":
        if labels.ndim == 2:
            raise UserError(
                f"{option}: expects one label for each image, but the images of this data may have several labels or "
                "none; use shuffle, or weights if the data has weights."
            )
        return 1 / labels.bincount().double()[labels]
    if weights is None:
        raise UserError(
            f"{option}: this data has no weights of its training samples; use balanced or shuffle. How your own data "
            "can have weights: docs/own_data.md."
        )
    if weights.shape != labels.shape[:1]:
        raise UserError(
            f"{option}: the data has {list(weights.shape)} weights for {len(labels)} training samples; expected one "
            "number for each."
        )
    weights = weights.double()
    wrong = (~(weights.isfinite() & (weights >= 0))).nonzero()[:, 0].tolist()
    if wrong:
        raise UserError(
            f"{option}: {len(wrong)} weights are negative or not finite, the first is {weights[wrong[0]].item()} of "
            f"training sample {wrong[0]}; expected numbers of at least 0."
        )
    if not bool((weights if unreadable is None else weights[~unreadable]).any()):
        raise UserError(f"{option}: the weights of all training samples that can be read are 0.")
    return weights


def create_draws(
    config: Config, labels: Tensor, weights: Tensor | None, unreadable: Tensor | None = None
) -> Draws | None:
    """What an epoch draws; None: each sample once. Takes and raises what `sample_weights` does."""
    if config.data.sampler == "shuffle":
        return None
    weights = sample_weights(config, labels, weights, unreadable)
    # Images with several labels have no class: treat all of them as one class.
    classes = torch.zeros(len(labels), dtype=torch.int64) if labels.ndim == 2 else labels
    return Draws(config.seed, classes, weights, unreadable)


def digest(weights: Tensor) -> str:
    """The SHA-256 of `weights` (float64 [n]), by which processes compare theirs."""
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()
