"""What must match for a run to resume from one of its checkpoints, `checkpoints/update-00001234/` in its directory.

store.py saves and restores them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import nn

from accel_train.checkpoint.directory import Snapshot, checkpoint_path, epochs_done, list_updates, versions
from accel_train.checkpoint.reading import check_same_model
from accel_train.checkpoint.state_dict import named_tensors
from accel_train.checkpoint.store import CheckpointStore, RestorePlan
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.compatibility import (
    SAMPLE_KEYS,
    check_changes,
    differences,
    is_under,
    learning_fingerprint,
)
from accel_train.config.schema import Config, as_dict
from accel_train.data.order.plan import create_plan
from accel_train.errors import UserError
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.ownership.lease import Lease
from accel_train.user_code.reference import parse_reference

if TYPE_CHECKING:  # it imports torch's launcher, too
    from torch.distributed.checkpoint.stateful import Stateful

DECAYS = ("weight-decay", "decay-all", "norm-weight-decay")
SCALES = ("layer-decay", "head-lr")
# The settings of an optimizer's parameter groups that are derived from an option with a different name.
GROUP_SETTINGS = {
    "lr": ("lr", "initial_lr", "lr_scale"),  # optim.head-lr is a multiple of it
    **dict.fromkeys(DECAYS, ("weight_decay",)),
    **dict.fromkeys(SCALES, ("lr_scale",)),
}


class Checkpoints(CheckpointStore):
    """The checkpoints of a run with a configuration: they name its settings, and a resume compares them."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        samples: int,
        ema: nn.Module | None = None,
        schedule: Stateful | None = None,
        lease: Lease | None = None,
        table: str = "",
    ) -> None:
        """As `CheckpointStore`. `samples`: number of training samples. `table`: the SHA-256 of the table that
        lists the data, or of its shards.
        """
        super().__init__(
            folder,
            accelerator,
            model,
            optimizer,
            lease=lease or Lease(folder.parent, None),
            ema=ema,
            # All other schedules follow from the update's number, even if their settings are allowed to change.
            schedule=schedule if config.schedule.name == "plateau" or _has_own_schedule(config) else None,
            keep=config.checkpoint.keep,
            milestone_epochs=config.checkpoint.milestone_epochs,
        )
        self.config, self.samples, self.table = config, samples, table
        self.bits = what_bits_depend_on(accelerator) if config.bitwise else {}
        self.rate_before: float | None = None
        """If settings have changed since the checkpoint: the learning rate that the next update would have had. On the
        main process."""
        self.description = {
            "seed": config.seed,
            "samples": samples,
            "table": table,
            "configuration": as_dict(config),
            "configuration_digest": learning_fingerprint(config),
            "bits": self.bits,
        }

    def _plan_restore(self, resume: str, allow: Sequence[str]) -> RestorePlan | None:
        check_changes({}, Config(), allow)  # so that an unknown key is refused in a new run, too
        return super()._plan_restore(resume, allow)

    def _match(self, path: Path, snapshot: Snapshot, allow: Sequence[str]) -> tuple[RestorePlan, Snapshot]:
        position, changes = self._check_settings(path, snapshot, allow)
        self.notes += [f"changed since the checkpoint: {text}" for text in self._differences(snapshot, changes)]
        if "best-metric" in changes:
            metric = self.config.best_metric or "value"
            self.notes.append(f"the best {metric} so far no longer counts; a new best is recorded from here on")
        self.rate_before = _rate_in(snapshot.optimizer) if changes else None
        changed = [key.removeprefix("optim.") for key in changes if key.startswith("optim.")]
        keep = tuple(name for key in changed for name in GROUP_SETTINGS.get(key, (key,)))
        if "name" in changed:
            self.notes.append("the checkpoint is of a different optimizer, so its state is not used")
            return RestorePlan(snapshot.state, position, None, keep), snapshot
        return self.plan_with_optimizer(path, snapshot, position, keep, self._without_steps(position))

    def _check_settings(
        self, path: Path, snapshot: Snapshot, allow: Sequence[str]
    ) -> tuple[TrainState, Mapping[str, str]]:
        """The position of the checkpoint, and the settings that differ from its own. Raises UserError if the run cannot
        go on from it. `allow`: settings that may differ although they change what is learned."""
        config, samples = self.config, self.samples
        counts = snapshot.state.get("samples", samples), samples
        changes = differences(
            snapshot.state["configuration"], config, counts, (snapshot.state.get("table", ""), self.table)
        )
        position = TrainState.from_saved(snapshot.state["train"], path)
        if "best-metric" in changes:  # the best value so far is one of another metric
            position.forget_best()
        obstacle = _obstacle_at(position, snapshot, path, config, samples, changes)
        if not obstacle:
            try:
                check_same_model(named_tensors(self.model), snapshot.model, path)
            except UserError as mismatch:
                obstacle = f"{mismatch} Give the old settings, or start a new run with another --output-dir."
        check_changes(changes, config, allow, obstacle)
        if snapshot.ema is not None and self.ema is not None:
            check_same_model(named_tensors(self.ema), snapshot.ema, path)
        if "best-metric" in changes and "best" in (snapshot.state["schedule"] or {}):
            snapshot.state["schedule"]["best"] = None  # as that of the position
        ends = {"epochs", "stop.updates", "batch-size", "schedule.per"} & changes.keys()
        if "schedule.name" in changes or (_has_own_schedule(config) and (ends or is_under("schedule.name", allow))):
            snapshot.state["schedule"] = None  # it begins anew, or its factors may be others
        self._check_schedule(snapshot.state["schedule"], path)
        return position, changes

    def _check_schedule(self, saved: dict[str, Any] | None, path: Path) -> None:
        try:
            if saved is not None and self.schedule is not None:
                self.schedule.load_state_dict(saved)
        except (LookupError, TypeError, ValueError):
            names = ", ".join(saved or {}) or "nothing"
            raise UserError(f"{path / 'state.json'}: schedule has {names}: that is not this run's schedule.") from None

    def _differences(self, snapshot: Snapshot, changes: Mapping[str, str]) -> list[str]:
        """What differs from the checkpoint: settings, what the bits depend on, versions."""
        before, bits = snapshot.state["versions"], snapshot.state.get("bits", {})
        return [
            *(f"{key}: {change}" for key, change in changes.items()),
            *(
                f"{name} {old} -> {self.bits.get(name)}: from here on the bits may be others"
                for name, old in bits.items()
                if old != self.bits.get(name)
            ),
            *(f"{name} {before.get(name)} -> {new}" for name, new in versions().items() if before.get(name) != new),
        ]

    def _without_steps(self, position: TrainState) -> frozenset[str]:
        """The parameters that were frozen in all updates so far, and will thaw."""
        if self.config.model.freeze_epochs is None:
            return frozenset()
        from accel_train.models.classifier import frozen_names
        from accel_train.models.wrapping import unwrap_model

        bare, settings = unwrap_model(self.model), self.config.model
        return frozen_names(bare, settings, position.epoch - (position.epoch_samples == 0))


def _obstacle_at(
    position: TrainState, snapshot: Snapshot, path: Path, config: Config, samples: int, changes: Mapping[str, str]
) -> str:
    """Why a run with so many training samples cannot go on from `position`, even if all `changes` of settings are
    allowed; "" if it can."""
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


def _has_own_schedule(config: Config) -> bool:
    return parse_reference("schedule.name", config.schedule.name) is not None


def _rate_in(optimizer: Mapping[str, Any]) -> float:
    """The learning rate in an optimizer's state, which may be of another optimizer, or damaged: then it is 0."""
    try:
        return max(float(group["lr"]) for group in optimizer["param_groups"])
    except (LookupError, TypeError, ValueError):
        return 0.0
