"""`accel-train find-lr`: a range test of the learning rate.

The recipe's model is trained for some updates while the learning rate grows exponentially (L. Smith 2017,
arxiv.org/abs/1506.01186, section 3.3). The loss falls, fastest at a good learning rate for the whole training, then it
grows: the rate is too high. Nothing is kept: no run, no checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from accel_train import models
from accel_train.config.schema import Config
from accel_train.data.order.plan import NO_END
from accel_train.errors import LOGGER, UserError, counted
from accel_train.evaluate import Batch
from accel_train.launch.environment import Launch
from accel_train.run.start import find_start, load_data
from accel_train.tools.report.curves import import_pyplot, save
from accel_train.train import grouped
from accel_train.training_setup import TrainingSetup, connect, create_training_setup

FIRST_RATE, LAST_RATE = 1e-6, 10.0
SMOOTHING = 0.9
"""Weight of the older losses in the mean."""
DIVERGED = 4.0
"""The test ends when the smoothed loss is so many times its smallest value."""
FEWEST = 10
"""Updates that a suggestion needs."""


@dataclass(frozen=True)
class LearningRates:
    """What a range test has found; the same on all processes."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Of each update, before its step: the mean over its samples."""
    smoothed: tuple[float, ...]
    """An exponential mean of the losses, without its bias at the start."""
    steepest: float | None
    """The rate around which the loss falls fastest over the logarithm of the rate; None: it does not fall."""


def find_lr(launch: Launch, config: Config, *, updates: int = 100) -> LearningRates:
    """Train the recipe `config` with learning rates from 1e-6 to 10, which grow by a constant factor.

    Its schedule is left out, and with layer decay or optim.head-lr the other rates grow in proportion. It ends when the
    loss diverges or is not finite. Collective. Raises UserError if the recipe or its data cannot be used, or fewer than
    10 updates give a usable loss.
    """
    if updates < FEWEST:
        raise UserError(f"--updates: expected at least {FEWEST}, found {updates}.")
    # What does not change the loss, but costs time or has a place in a run.
    config = dataclasses.replace(config, resume="never", trackers=(), bitwise=False)
    accelerator = connect(config, launch)
    begin = find_start(config, accelerator)
    splits = load_data(begin.config, accelerator)
    setup = create_training_setup(begin.config, launch, accelerator, splits, weights=begin.weights)
    setup.sampler.plan = dataclasses.replace(setup.plan, updates=NO_END)  # the recipe's run may have fewer updates
    models.set_train_mode(setup.model, begin.config.model)
    rates = np.geomspace(FIRST_RATE, LAST_RATE, updates).tolist()
    losses: list[float] = []
    smoothed: list[float] = []
    mean = 0.0
    for rate, micro_batches in zip(rates, _batches(setup), strict=False):
        loss = _update(setup, len(losses), rate, micro_batches)
        if not math.isfinite(loss):
            break
        losses.append(loss)
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING ** len(losses)))
        if accelerator.is_main_process and len(losses) % math.ceil(updates / 10) == 0:
            LOGGER.info(f"update {len(losses)}/{updates}, learning rate {rate:.2g}, loss {smoothed[-1]:.4g}")
        if smoothed[-1] > DIVERGED * min(smoothed):
            break
    if len(losses) < FEWEST:
        raise UserError(
            f"The loss has diverged after {counted(len(losses), 'update')}, at a learning rate of "
            f"{rates[len(losses)]:.2g}: look at the data and its normalisation."
        )
    tried = rates[: len(losses)]
    return LearningRates(tuple(tried), tuple(losses), tuple(smoothed), suggestion(tried, losses, smoothed))


def _batches(setup: TrainingSetup) -> Iterator[tuple[int, Iterator[Batch]]]:
    """The micro-batches of each update, over as many epochs as are asked for, with the number of real samples."""
    epoch = 0
    while True:
        setup.sampler.seek(epoch, 0)
        done = 0
        for micro_batches in grouped(iter(setup.training.batches), setup.plan.accumulation):
            yield setup.sampler.real_samples(done), micro_batches
            done += setup.plan.real_samples(done)
        epoch += 1


def _update(setup: TrainingSetup, update: int, rate: float, batches: tuple[int, Iterator[Batch]]) -> float:
    """An update with the learning rate `rate`, as train.py makes it; return its mean loss, over all processes."""
    samples, micro_batches = batches
    highest = max(group.get("lr_scale", 1.0) for group in setup.optimizer.param_groups)
    for group in setup.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0) / highest
    total = torch.zeros((), dtype=torch.float64, device=setup.device)
    for batch in setup.step.micro_batches(micro_batches, update, samples):
        inputs, targets = setup.training.transform(batch)
        losses = setup.criterion(setup.step.forward(inputs), targets) * batch["weights"]
        setup.step.backward(losses)
        total += losses.detach().sum(dtype=torch.float64)
    setup.step.apply(update + 1)
    mean: float = setup.accelerator.reduce(total, "sum").item() / max(1, samples)
    return mean


def suggestion(rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """The rate around which the loss falls fastest; None: it falls nowhere before the smoothed loss is smallest.

    It is the middle of the decade of rates, up to that minimum, in which a straight line through the losses over the
    logarithm of the rate falls most steeply: a slope from one update to the next would be that of the noise. Rates
    grow by a constant factor.
    """
    lowest = int(np.argmin(smoothed))
    decade = max(3, round(1 / math.log10(rates[1] / rates[0])))  # updates
    starts = range(max(0, lowest + 1 - decade) + 1)
    slopes = [np.polyfit(np.log10(rates[at : at + decade]), losses[at : at + decade], 1)[0] for at in starts]
    steepest = int(np.argmin(slopes))
    return rates[steepest + decade // 2] if lowest and slopes[steepest] < 0 else None


def plot(found: LearningRates, path: Path) -> None:
    """Draw the losses over the rates, with the suggestion, into the SVG file `path`. Raises UserError without
    matplotlib."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(layout="constrained")
    axes.plot(found.rates, found.losses, alpha=0.4, label="loss of an update")
    axes.plot(found.rates, found.smoothed, label="smoothed")
    if found.steepest is not None:
        axes.axvline(found.steepest, linestyle="--", label=f"falls fastest: {found.steepest:.2g}")
    first, lowest = found.smoothed[0], min(found.smoothed)
    axes.set_ylim(lowest - 0.1 * (first - lowest or 1), first + 0.7 * (first - lowest or 1))  # not the whole explosion
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.legend()
    save(figure, path)
