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
from scipy.signal import savgol_filter

from accel_train import models
from accel_train.config.schema import Config, Schedule, Stop
from accel_train.errors import LOGGER
from accel_train.launch.environment import Launch
from accel_train.run.start import find_start, load_data
from accel_train.tools.report.curves import import_pyplot
from accel_train.training_setup import TrainingSetup, connect, create_training_setup

FIRST_RATE, LAST_RATE = 1e-6, 10.0
FEWEST = 10
"""Updates that a suggestion needs."""
DIVERGED = 4.0
"""The test ends when the loss is so many times the highest one of the first 10 updates."""


@dataclass(frozen=True)
class LearningRates:
    """What a range test has found; the same on all processes."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    """Of each update, before its step: the mean over its samples."""
    smoothed: tuple[float, ...]
    """A straight line through the losses of the decade of rates around each rate."""
    steepest: float | None
    """The value of optim.lr around which the loss falls fastest over its logarithm; None: it does not fall."""


def find_lr(launch: Launch, config: Config, *, updates: int = 100) -> LearningRates:
    """Train the recipe `config` with learning rates from 1e-6 to 10, which grow by a constant factor.

    Its schedule is left out, and with layer decay or optim.head-lr the other rates grow in proportion. It ends when the
    loss diverges or is not finite; with fewer than 10 `updates` until then there is no suggestion. Collective. Raises
    UserError if the recipe or its data cannot be used.
    """
    # A run that is long enough, without what does not change the loss, but costs time or has a place in a run.
    config = dataclasses.replace(config, resume="auto", output_dir=None, trackers=(), bitwise=False)
    config = dataclasses.replace(config, on_nonfinite="stop", epochs=updates, stop=Stop(), schedule=Schedule())
    accelerator = connect(config, launch)
    begin = find_start(config, accelerator)
    splits = load_data(begin.config, accelerator)
    setup = create_training_setup(begin.config, launch, accelerator, splits, weights=begin.weights)
    rates = np.geomspace(FIRST_RATE, LAST_RATE, updates).tolist()
    losses: list[float] = []
    for rate, loss in zip(rates, _losses(setup, rates), strict=True):
        if not loss < DIVERGED * max(losses[:FEWEST], default=math.inf):  # also if it is not finite
            break
        losses.append(loss)
        if accelerator.is_main_process and len(losses) % math.ceil(updates / 10) == 0:
            LOGGER.info(f"update {len(losses)}/{updates}, learning rate {rate:.2g}, loss {loss:.4g}")
    return fit(rates[: len(losses)], losses)


def _losses(setup: TrainingSetup, rates: Sequence[float]) -> Iterator[float]:
    """Make an update with each of the `rates`, as train.py does; yield its mean loss, over all processes."""
    models.set_train_mode(setup.model, setup.config.model)
    plan, numbered = setup.plan, enumerate(rates)
    for epoch in range(math.ceil(len(rates) / plan.updates_per_epoch)):
        setup.sampler.seek(epoch)
        updates = setup.sampler.updates(setup.training.batches)
        for (size, micro_batches), (update, rate) in zip(updates, numbered, strict=False):
            for group in setup.optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)
            total = torch.zeros((), dtype=torch.float64, device=setup.device)
            for batch in setup.step.micro_batches(micro_batches, update, size.samples):
                inputs, targets = setup.training.transform(batch)
                losses = setup.criterion(setup.step.forward(inputs), targets) * batch["weights"]
                setup.step.backward(losses)
                total += losses.detach().sum(dtype=torch.float64)
            setup.step.apply(update + 1)
            yield setup.accelerator.reduce(total, "sum").item() / max(1, size.samples)


def fit(rates: Sequence[float], losses: Sequence[float]) -> LearningRates:
    """The smoothed loss, and where it falls fastest: a straight line through the losses of a decade of rates gives both
    for the rate in its middle. From one update to the next the slope would be that of the noise."""
    if len(losses) < FEWEST:
        return LearningRates(tuple(rates), tuple(losses), tuple(losses), None)
    decade = max(3, round(1 / math.log10(rates[1] / rates[0])) | 1)  # an odd number of updates
    window = min(decade, (len(losses) - 1) | 1)
    smoothed, slopes = (savgol_filter(losses, window, polyorder=1, deriv=order) for order in (0, 1))
    steepest = slopes[: smoothed.argmin() + 1].argmin()
    suggested = rates[steepest] if slopes[steepest] < 0 else None
    return LearningRates(tuple(rates), tuple(losses), tuple(smoothed.tolist()), suggested)


def plot(found: LearningRates, path: Path) -> None:
    """Draw the losses over the rates, with the suggestion, into the SVG file `path`. Raises UserError without
    matplotlib."""
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(layout="constrained")
    axes.plot(found.rates, found.losses, alpha=0.4, label="loss of an update")
    axes.plot(found.rates, found.smoothed, label="smoothed")
    if found.steepest is not None:
        axes.axvline(found.steepest, linestyle="--", label=f"falls fastest: {found.steepest:.2g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})  # the same losses give the same file
    pyplot.close(figure)
