"""Where in its data a run goes on from a checkpoint, and why it cannot if the data or the run's length differs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

from accel_train.checkpoint.directory import checkpoint_path, list_updates
from accel_train.checkpoint.format import Snapshot, epochs_done
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.compatibility import SAMPLE_KEYS
from accel_train.config.schema import Config
from accel_train.data.order.plan import create_plan


def position_in(snapshot: Snapshot, path: Path, config: Config, samples: int, changes: Mapping[str, str]) -> TrainState:
    """The position of the checkpoint `path` in this run's data, which has so many training samples.

    `changes`: the differences between the checkpoint's settings and this run's. Raises UserError.
    """
    position = TrainState.from_saved(snapshot.state["train"], path)
    if "best-metric" in changes:  # the best value so far is one of another metric
        position.forget_best()
    if not changes.keys().isdisjoint({*SAMPLE_KEYS, "data", "batch-size", "data.drop-last"}):
        # Updates to be skipped that are still to come have different samples now.
        position.left_out = [update for update in position.left_out if update <= position.update]
    return position


def obstacle_at(
    position: TrainState, snapshot: Snapshot, path: Path, config: Config, samples: int, changes: Mapping[str, str]
) -> str:
    """Why the run cannot go on from `position`, even if all changes of settings are allowed; "" if it can.

    The arguments: see `position_in`.
    """
    if too_short := _too_short(position, path, config, samples):
        return too_short
    by_batch = ("batch-size",) if config.data.order == "shards" else ()  # canonical nodes divide the batch
    changed = [f"{key}: {changes[key]}" for key in (*SAMPLE_KEYS, *by_batch, "data") if key in changes]
    saved_samples = snapshot.state.get("samples", samples)
    if saved_samples != samples and "data" not in changes:
        changed.append(f"{saved_samples} -> {samples} training samples")
    if not (position.epoch_samples and changed):
        return ""
    checkpoints = [checkpoint_path(path.parent, update) for update in list_updates(path.parent)]
    epoch_ends = [checkpoint for checkpoint in checkpoints if epochs_done(checkpoint)]
    instead = f": --resume {shlex.quote(str(epoch_ends[-1]))}" if epoch_ends else ", if there is one"
    return (
        f"{path} is in the middle of epoch {position.epoch + 1}, which has to be completed with the samples with "
        f"which it began ({'; '.join(changed)}). Give the old settings until the epoch is complete, or start with "
        f"another --output-dir from a checkpoint at the end of an epoch{instead}."
    )


def _too_short(position: TrainState, path: Path, config: Config, samples: int) -> str:
    """Why a run of so many epochs or updates has no update `position`; "" if it has."""
    least = position.epoch + (position.epoch_samples > 0)
    option = f"--epochs {config.epochs}"
    state = f"epoch {least} has begun" if position.epoch_samples else f"{least} epochs are done"
    if least <= math.ceil(config.epochs):
        ends_within = config.stop.updates is not None or config.epochs != int(config.epochs)
        if not ends_within or samples < config.batch_size:  # other mistakes are told elsewhere
            return ""
        plan = create_plan(config, samples, processes=1, accumulation=1, virtual_batch=1)
        done = plan.updates_until(position.epoch, position.epoch_samples)
        if done <= plan.updates:
            return ""
        if plan.updates == config.stop.updates:
            option, state, least = f"--stop.updates {plan.updates}", f"{done} updates are done", done
    return f"{option}: {state} in {path}. Give at least {least}, or start a new run with another --output-dir."
