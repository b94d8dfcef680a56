"""Whether a run can go on from a checkpoint with its current settings, and what has to be restored."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from accel_train.checkpoint.directory import checkpoint_path, list_updates
from accel_train.checkpoint.format import Snapshot, epochs_done, versions
from accel_train.checkpoint.state_dict import named_tensors, outline
from accel_train.checkpoint.store import RestorePlan
from accel_train.checkpoint.train_state import TrainState
from accel_train.checkpoint.weights import check_same_model
from accel_train.config.compatibility import (
    IN_MEMORY,
    SAMPLE_KEYS,
    check_changes,
    check_same_calls,
    check_same_images,
    check_same_pixels,
    check_same_policy,
    check_same_splits,
    differences,
    flatten,
    with_older_batchnorm,
)
from accel_train.config.schema import Config, as_dict
from accel_train.data.order.plan import Plan, create_plan
from accel_train.errors import UserError
from accel_train.models.batchnorm.layers import VirtualBatchNorm
from accel_train.untrusted import is_count

DECAYS = ("weight-decay", "decay-all", "norm-weight-decay", "bias-weight-decay", "embedding-weight-decay")
SCALES = ("layer-decay", "layer-decay-min-scale", "head-lr", "bias-lr")
# The settings of an optimizer's parameter groups that are derived from an option with a different name.
GROUP_SETTINGS = {
    "lr": ("lr", "initial_lr", "lr_scale"),  # optim.head-lr is a multiple of it
    **dict.fromkeys(DECAYS, ("weight_decay",)),
    **dict.fromkeys(SCALES, ("lr_scale",)),
}


@dataclass
class RunParts:
    """The parts of a run that a checkpoint saves and restores, and the settings that it has to match."""

    config: Config
    samples: int
    """Number of training samples."""
    table: str
    """SHA-256 of the table that lists the data, or of its shards: `Splits.table`."""
    pixels: int
    """The semantics number by which the data's images are found and their pixels computed (`Splits.semantics`)."""
    model: nn.Module
    """As Accelerate prepared it."""
    ema: nn.Module | None
    optimizer: torch.optim.Optimizer
    schedule: Stateful | None
    """A schedule that depends on more than the update's number; its state must be fit for JSON."""
    bits: dict[str, str]
    """With --bitwise: what the bits depend on, see optim/bitwise.py."""

    @property
    def has_batchnorm(self) -> bool:
        """Whether BatchNorm counts over virtual batches."""
        return any(isinstance(module, VirtualBatchNorm) for module in self.model.modules())

    @property
    def has_regular_batchnorm(self) -> bool:
        """Whether each forward pass calls each BatchNorm exactly once."""
        return all(module.regular for module in self.model.modules() if isinstance(module, VirtualBatchNorm))


def plan_restore(
    path: Path, snapshot: Snapshot, run: RunParts, allow: Sequence[str], notes: list[str]
) -> tuple[RestorePlan, Snapshot]:
    """How to restore the checkpoint `path`, and the part of its contents that `run` takes. On the main process.

    `allow`: settings that may differ although they change what is learned. What the user should know is appended to
    `notes`. Raises UserError if the run cannot go on from the checkpoint.
    """
    saved, semantics = snapshot.state["configuration"], snapshot.state.get("semantics", 1)
    if run.has_batchnorm:
        saved = with_older_batchnorm(saved, semantics)
    check_same_images(str(path), semantics, run.pixels)
    samples = snapshot.state.get("samples", run.samples), run.samples
    tables = snapshot.state.get("table", ""), run.table
    changes = differences(saved, run.config, samples, tables)
    position = _position(path, snapshot, run, changes)
    obstacle = _obstacle(path, snapshot, run, position, changes)
    check_changes(saved, run.config, allow, samples=samples, tables=tables, obstacle=obstacle)
    check_same_pixels(str(path), snapshot.state.get("pixels", IN_MEMORY), run.pixels)
    check_same_calls(str(path), semantics, regular=run.has_regular_batchnorm)
    if "augment.policy" not in changes:
        check_same_policy(str(path), semantics, run.config.augment.policy)
    check_same_splits(str(path), semantics, saved.get("data", {}))
    if snapshot.ema is not None and run.ema is not None:
        check_same_model(named_tensors(run.ema), snapshot.ema, path)
    if "best-metric" in changes and "best" in (snapshot.state["schedule"] or {}):
        snapshot.state["schedule"]["best"] = None  # as that of the position
    _check_schedule(snapshot.state["schedule"], run, path)
    notes += [f"changed since the checkpoint: {key}: {change}" for key, change in changes.items()]
    notes += [
        f"changed since the checkpoint: {name} {old} -> {run.bits.get(name)}: from here on the bits may be others"
        for name, old in snapshot.state.get("bits", {}).items()
        if old != run.bits.get(name)
    ]
    notes += [
        f"changed since the checkpoint: {name} {old} -> {new}"
        for name, new in versions().items()
        if (old := snapshot.state["versions"].get(name)) != new
    ]
    if "best-metric" in changes:
        metric = run.config.best_metric or "value"
        notes.append(f"the best {metric} so far no longer counts; a new best is recorded from here on")
    changed = [key.removeprefix("optim.") for key in changes if key.startswith("optim.")]
    keep = tuple(name for key in changed for name in GROUP_SETTINGS.get(key, (key,)))
    if "name" in changed:
        notes.append("the checkpoint is of a different optimizer, so its state is not used")
        return RestorePlan(snapshot.state, position, None, keep), snapshot
    stepless = _without_steps(run, position)
    optimizer = matching_optimizer(path, snapshot, run.model, run.optimizer, position, keep, notes, stepless)
    plan = RestorePlan(snapshot.state, position, outline(optimizer), keep)
    return plan, dataclasses.replace(snapshot, optimizer=optimizer)


def _without_steps(run: RunParts, position: TrainState) -> frozenset[str]:
    """The parameters that were frozen in all updates so far, and will thaw."""
    if run.config.model.freeze_epochs is None:
        return frozenset()
    from accel_train.models.freezing import frozen_names
    from accel_train.models.wrapping import unwrap_model

    return frozen_names(unwrap_model(run.model), run.config.model, position.epoch - (position.epoch_samples == 0))


def matching_optimizer(
    path: Path,
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: TrainState,
    keep: Sequence[str],
    notes: list[str],
    stepless: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The part of the saved optimizer state that this run's optimizer takes. Raises UserError if they do not match.

    `stepless`: the names of parameters that have had no step and no state yet.
    """
    from accel_train.checkpoint.optimizer_check import MismatchError, matching_state

    trained = position.update > len(position.left_out)
    try:
        matching, missing = matching_state(model, optimizer, snapshot.optimizer, keep)
        # With a loss scaler the first updates often overflow, and leave no state.
        if missing and not matching["state"] and not keep and trained and not snapshot.state["scaler"]:
            raise MismatchError(f"it has no state of any parameter after {position.update} updates")
    except MismatchError as error:
        raise UserError(
            f"{path / 'optimizer.pt'} does not fit this run's optimizer: {error}. If you do not trust it, delete "
            f"{path}; the previous checkpoint is used then."
        ) from None
    missing = [name for name in missing if name not in stepless]
    if missing and trained:
        notes.append(
            f"{path / 'optimizer.pt'} has no state of {len(missing)} parameters, such as {missing[0]}: the "
            "optimizer starts with a new state for them"
        )
    return matching


def _check_schedule(saved: dict[str, Any] | None, run: RunParts, path: Path) -> None:
    try:
        if saved is not None and run.schedule is not None:
            run.schedule.load_state_dict(saved)
    except (LookupError, TypeError, ValueError):
        names = ", ".join(saved or {}) or "nothing"
        raise UserError(f"{path / 'state.json'}: schedule has {names}: that is not this run's schedule.") from None


def _position(path: Path, snapshot: Snapshot, run: RunParts, changes: Mapping[str, str]) -> TrainState:
    """The position of the checkpoint; `changes` are the differences between its settings and this run's."""
    saved = snapshot.state["train"]
    position = TrainState.from_saved(saved, path)
    if "best-metric" in changes:  # the best value so far is one of another metric
        position.forget_best()
    if not changes.keys().isdisjoint({*SAMPLE_KEYS, "data", "batch-size", "data.drop-last"}):
        # Updates to be skipped that are still to come have different samples now.
        position.left_out = [update for update in position.left_out if update <= position.update]
    if "epoch_samples" not in saved:  # older versions counted updates, all of one size
        position.epoch_samples = position.epoch_count
        if changes.keys().isdisjoint(SAMPLE_KEYS):
            old = {**flatten(as_dict(Config())), **flatten(snapshot.state["configuration"])}
            if not is_count(old["batch-size"], 1):
                raise _misplaced(path, run, position)
            plan = Plan(run.samples, old["batch-size"], 1, 1, bool(old["data.drop-last"]))
            updates = position.update - position.epoch * plan.updates_per_epoch
            if not 0 <= updates <= plan.updates_per_epoch:
                raise _misplaced(path, run, position)
            position.epoch_samples = min(updates * plan.batch_size, run.samples)
        position.epoch_left_out = position.epoch_samples - position.epoch_count
        if position.epoch_left_out < 0:
            raise _misplaced(path, run, position)
    return position


def _misplaced(path: Path, run: RunParts, position: TrainState) -> UserError:
    return UserError(
        f"{path} does not fit the training data, which has {run.samples} samples: update {position.update} is not "
        f"in epoch {position.epoch + 1} of it. Has the data changed?"
    )


def _too_short(path: Path, run: RunParts, position: TrainState) -> str:
    """Why a run of so many epochs or updates has no update `position`; "" if it has."""
    config, stop = run.config, run.config.stop.updates
    least = position.epoch + (position.epoch_samples > 0)
    option = f"--epochs {config.epochs}"
    state = f"epoch {least} has begun" if position.epoch_samples else f"{least} epochs are done"
    if least <= math.ceil(config.epochs):
        ends_within = stop is not None or config.epochs != int(config.epochs)
        if not ends_within or run.samples < config.batch_size:  # other mistakes are told elsewhere
            return ""
        plan = create_plan(config, run.samples, processes=1, accumulation=1, virtual_batch=1)
        done = plan.updates_until(position.epoch, position.epoch_samples)
        if done <= plan.updates:
            return ""
        if plan.updates == stop:
            option, state, least = f"--stop.updates {stop}", f"{done} updates are done", done
    return f"{option}: {state} in {path}. Give at least {least}, or start a new run with another --output-dir."


def _obstacle(
    path: Path, snapshot: Snapshot, run: RunParts, position: TrainState, changes: Mapping[str, str]
) -> str | None:
    """Why the run cannot go on from the checkpoint even if all changes of settings are allowed; None if it can."""
    if too_short := _too_short(path, run, position):
        return too_short
    by_batch = ("batch-size",) if run.config.data.order == "shards" else ()  # canonical nodes divide the batch
    changed = [f"{key}: {changes[key]}" for key in (*SAMPLE_KEYS, *by_batch, "data") if key in changes]
    saved_samples = snapshot.state.get("samples", run.samples)
    if saved_samples != run.samples and "data" not in changes:
        changed.append(f"{saved_samples} -> {run.samples} training samples")
    if position.epoch_samples and changed:
        checkpoints = [checkpoint_path(path.parent, update) for update in list_updates(path.parent)]
        epoch_ends = [checkpoint for checkpoint in checkpoints if epochs_done(checkpoint)]
        instead = f": --resume {shlex.quote(str(epoch_ends[-1]))}" if epoch_ends else ", if there is one"
        return (
            f"{path} is in the middle of epoch {position.epoch + 1}, which has to be completed with the samples with "
            f"which it began ({'; '.join(changed)}). Give the old settings until the epoch is complete, or start with "
            f"another --output-dir from a checkpoint at the end of an epoch{instead}."
        )
    try:
        check_same_model(named_tensors(run.model), snapshot.model, path)
    except UserError as mismatch:
        return f"{mismatch} Give the old settings, or start a new run with another --output-dir."
    return None
