"""Checkpoints of a model and its optimizer: saved in the background, pruned, and restored on any number of processes.

directory.py makes a checkpoint complete or absent, and chooses the one to resume from; state.py gathers what is in
it from many processes and sends it to them. What a run has to match to resume from it is decided by the class of the
run: `Checkpoints` for the trainer, a loop of one's own has its own.
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from accel_train.checkpoint.directory import (
    Snapshot,
    check_can_commit,
    checkpoint_path,
    choose_checkpoint,
    commit,
    delete_checkpoint,
    list_updates,
    not_ours,
    updates_to_keep,
    versions,
    write_checkpoint,
)
from accel_train.checkpoint.state import (
    MismatchError,
    TrainState,
    broadcast_optimizer_state,
    broadcast_weights,
    check_same_model,
    gather_to_main,
    matching_state,
    named_tensors,
    optimizer_state,
    outline,
    state_mismatch,
)
from accel_train.config.compatibility import (
    FORMAT,
    SAMPLE_KEYS,
    check_changes,
    differences,
    is_under,
    learning_fingerprint,
)
from accel_train.config.schema import Config, as_dict
from accel_train.data.order import create_plan
from accel_train.errors import UserError, reason_of
from accel_train.launch.agreement import broadcast_from_main
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.ownership.owner import Lease, LostError
from accel_train.user_code import parse_reference

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


@dataclass(frozen=True)
class RestorePlan:
    """What all processes have to know to restore a checkpoint that only the main process reads."""

    state: dict[str, Any]
    position: TrainState
    optimizer: dict[str, Any] | None
    """The outline of the optimizer's state; None: the optimizer starts with a new state."""


class CheckpointStore(ABC):
    """The checkpoints of one run. Every process has one; only the main process writes and reads the disk.

    The main process knows (the writing thread appends to the first two; they may be read at any time):

    committed       the updates of saves that were completed; whoever reads them removes them
    failures        one line for each save that failed; the older checkpoints stay complete
    unpublished     one line if the final weights could not be copied into the run's directory, else ""
    notes           one line for each fact about a restore that the user should know
    last_saved      update of the newest checkpoint that is complete on the disk, or None
    last_seconds    duration of the last completed save
    stalled_seconds time for which it delayed training
    """

    ema: nn.Module | None = None
    schedule: Stateful | None = None
    """Its state must be fit for JSON."""
    keep = 2
    """How many of the newest checkpoints are kept, besides the best one."""

    def __init__(
        self, folder: Path, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, lease: Lease
    ) -> None:
        """`folder`: for the checkpoints; its parent, the run's directory, must exist when a checkpoint is saved.

        `model` and `optimizer` are as Accelerate prepared them, or without their wrappers. `lease`: is checked before
        anything in the folder is changed.
        """
        self.folder, self.accelerator, self.lease, self.model = folder, accelerator, lease, model
        self.optimizer: Optimizer = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapper
        self.committed: deque[int] = deque()
        self.failures: list[str] = []
        self.unpublished = ""
        self.notes: list[str] = []
        self.last_saved: int | None = None
        self.loaded_update: int | None = None  # of the checkpoint that was restored last
        self.last_seconds = self.stalled_seconds = 0.0
        self.description: dict[str, Any] = {}
        """What state.json says of the run itself: the class of the run fills it in."""
        self._writer: threading.Thread | None = None
        self._snapshot: Snapshot | None = None  # to restore; on the main process only

    @abstractmethod
    def _match(self, path: Path, snapshot: Snapshot, allow: Sequence[str]) -> tuple[RestorePlan, Snapshot]:
        """How to restore the checkpoint `path`, and the part of its contents that this run takes. On the main process.

        What the user should know is appended to `notes`. Raises UserError if the run cannot go on from it.
        """

    def check_writable(self) -> None:
        """Raise UserError if no checkpoint can be written here. Before training, on the main process."""
        try:
            check_can_commit(self.folder)
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"{self.folder} is not a folder, so no checkpoint can be written. "
                "Remove it, or give another --output-dir."
            ) from None
        except OSError as error:
            raise UserError(
                f"No checkpoint can be written in {self.folder} ({error.strerror}){self._free_space()}. "
                "Free some space there, or give another --output-dir."
            ) from None

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run that the main process knows of; None if there is none."""
        if self.last_saved is None:
            return None
        path = checkpoint_path(self.folder, self.last_saved)
        return path if path.is_dir() else None  # somebody may have moved it away

    @property
    def kept(self) -> str:
        """What is left of the run if it ends now, in words."""
        if self.newest() is None:
            return "nothing, because there is no checkpoint"
        return f"the checkpoint of update {self.last_saved}, the newest complete one"

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Save a checkpoint of `state`. Collective: all processes call it at the same update.

        It returns when the copy in host memory is complete; a thread of the main process writes it to the disk, and
        `wait` waits for that, too. Disk errors are appended to `failures`, not raised. The checkpoint of
        `state.best_update` is kept as the best: save after an evaluation, not before.
        """
        started = time.perf_counter()
        self.wait()
        is_main: bool = self.accelerator.is_main_process
        live = (
            named_tensors(self.model),
            None if self.ema is None else named_tensors(self.ema),
            optimizer_state(self.model, self.optimizer),
        )
        model, ema, optimizer = gather_to_main(live, here=is_main)
        if is_main:
            scaler, schedule = self.accelerator.scaler, self.schedule
            described = {
                "train": state.to_saved(),
                **self.description,
                "format": FORMAT,
                "versions": versions(),
                "processes": self.accelerator.num_processes,
                "generation": self.lease.generation,
                "scaler": None if scaler is None else scaler.state_dict(),
                "schedule": None if schedule is None else schedule.state_dict(),
            }
            snapshot = Snapshot(model, ema, optimizer, described)
            # Not a daemon thread: even if the program ends with an error, this checkpoint is completed.
            self._writer = threading.Thread(target=self._write, args=(snapshot, started), name="checkpoint")
            self._writer.start()
            self.stalled_seconds = time.perf_counter() - started
            if wait:
                self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a save is in progress. The program does not end before it is done."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Wait until the last save is done. Not collective: only the main process writes."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def publish_weights(self, update: int) -> None:
        """Copy the weights of the checkpoint of `update` into the run's directory, where they are easy to find."""
        if not self.accelerator.is_main_process:
            return
        self.wait()
        self.lease.check()
        try:
            for weights in sorted(checkpoint_path(self.folder, update).glob("*.safetensors")):
                with self.lease.replacing(self.folder.parent / weights.name) as temporary:
                    shutil.copyfile(weights, temporary)
        except OSError as error:
            self.unpublished = f"the final weights are only in {self.folder}: {error}"
            self.failures.append(self.unpublished)

    def restore(self, resume: str = "auto", allow_change: Sequence[str] = ()) -> TrainState | None:
        """Restore model, optimizer, EMA, loss scaler and schedule; return the position, or None for a new run.

        Collective. The main process removes what a killed run left and decides for all; only its disk needs to have
        the checkpoints. `resume`:

        auto   the newest complete checkpoint of this run, if there is one
        must   the same; UserError if there is none
        PATH   a checkpoint, or the newest complete one in a run's directory. If it belongs to another run, but this
               run has checkpoints of its own, these are used: a job that is started again goes on where it was

        A broken checkpoint of this run is renamed, and the previous one is used. `allow_change` names settings that may
        differ from the checkpoint's although they change what is learned; see config/compatibility.py. Raises
        UserError, the same on all processes.
        """
        self.wait()
        plan = broadcast_from_main(self.accelerator, lambda: self._plan_restore(resume, allow_change))
        if plan is None:
            return None
        model = ema = optimizer = None  # only the main process has them
        if self._snapshot is not None:
            # A run that had no EMA starts one from the weights.
            model, optimizer = self._snapshot.model, self._snapshot.optimizer
            ema = self._snapshot.ema or model
            self._snapshot = None
        broadcast_weights(named_tensors(self.model), model)
        if self.ema is not None:
            broadcast_weights(named_tensors(self.ema), ema)
        if plan.optimizer is not None:  # else the checkpoint is of another optimizer, and this one begins anew
            try:
                broadcast_optimizer_state(self.model, self.optimizer, plan.optimizer, optimizer)
            except MismatchError as error:
                raise state_mismatch(plan.position.update, str(error)) from error
        if plan.state["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(plan.state["scaler"])
        if plan.state["schedule"] is not None and self.schedule is not None:
            self.schedule.load_state_dict(plan.state["schedule"])
        self.loaded_update = plan.position.update
        return plan.position

    def raise_state_advice(self, error: Exception, update: int) -> None:
        """Raise UserError if `error` is of the first step, after `update` updates, with a state that was restored."""
        if isinstance(error, UserError):
            return
        of_step = any(frame.f_code.co_name == "step" for frame, _ in traceback.walk_tb(error.__traceback__))
        if of_step and update == self.loaded_update:
            raise state_mismatch(update, f"{type(error).__name__}: {reason_of(error, 200)}") from error

    def plan_with_optimizer(
        self, path: Path, snapshot: Snapshot, position: TrainState, keep: Sequence[str] = ()
    ) -> tuple[RestorePlan, Snapshot]:
        """What `_match` returns, with the part of the saved optimizer state that this run's optimizer takes.

        `keep`: settings of its parameter groups that are taken from this run, not from the checkpoint. Raises UserError
        if the state does not match.
        """
        try:
            matching = matching_state(self.model, self.optimizer, snapshot.optimizer, keep)
            plan = RestorePlan(snapshot.state, position, outline(matching))
        except Exception as error:  # whatever a state of another optimizer makes of it
            raise UserError(
                f"{path / 'optimizer.pt'} does not fit this run's optimizer: {reason_of(error, 200)}. If you do not "
                f"trust it, delete {path}; the previous checkpoint is used then."
            ) from error
        return plan, dataclasses.replace(snapshot, optimizer=matching)

    def _plan_restore(self, resume: str, allow: Sequence[str]) -> RestorePlan | None:
        """On the main process: what to restore, or None for a new run. Sets `_snapshot`."""
        self.lease.check()
        try:
            chosen = choose_checkpoint(self.folder, resume, self.notes)
        except OSError as error:
            raise UserError(f"The checkpoints in {self.folder} cannot be read: {error}") from None
        if chosen is None:
            return None
        path, snapshot = chosen
        if path.parent != self.folder:
            self.notes.append(f"goes on from {path}")
        try:
            plan, self._snapshot = self._match(path, snapshot, allow)
        except UserError:
            raise
        except Exception as error:  # whatever a state.json with other contents makes of it
            raise not_ours(path / "state.json", error) from error
        if path.parent.resolve() == self.folder.resolve():
            self.last_saved = plan.position.update
            best = plan.position.best_update
            if best is not None and not checkpoint_path(self.folder, best).is_dir():
                self.notes.append(
                    f"the best checkpoint so far, that of update {best}, is not in {self.folder} any more"
                )
        return plan

    def _write(self, snapshot: Snapshot, started: float) -> None:
        """In the thread: write a checkpoint, then delete those that are no longer needed."""
        update, best = snapshot.state["train"]["update"], snapshot.state["train"]["best_update"]
        try:
            commit(self.folder, update, lambda folder: write_checkpoint(folder, snapshot), check=self.lease.check)
            self.last_saved = update
            self.committed.append(update)
            self.last_seconds = time.perf_counter() - started
            updates = list_updates(self.folder)
            for old in sorted(set(updates) - updates_to_keep(updates, self.keep, best)):
                self.lease.check()
                delete_checkpoint(self.folder, old)
        except LostError:
            pass  # the main thread gets the same error before its next write
        except Exception as error:  # on a full disk, safetensors and torch.save raise their own errors
            self.failures.append(f"checkpoint of update {update}: {type(error).__name__}: {error}{self._free_space()}")

    def _free_space(self) -> str:
        """For the message of a failed save: torch.save's own message does not say that the disk is full."""
        try:
            return f" ({shutil.disk_usage(self.folder.parent).free / 2**20:,.0f} MiB are free there)"
        except OSError:
            return ""


class Checkpoints(CheckpointStore):
    """The checkpoints of a run with a configuration: they name its settings, and a resume compares them."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        lease: Lease,
        *,
        samples: int,
        ema: nn.Module | None = None,
        schedule: Stateful | None = None,
        table: str = "",
    ) -> None:
        """In the directory of `lease`. `samples`: number of training samples. `table`: the SHA-256 of the table that
        lists the data, or of its shards.
        """
        super().__init__(lease.directory / "checkpoints", accelerator, model, optimizer, lease)
        self.ema, self.keep = ema, config.checkpoint.keep
        if config.schedule.name == "plateau" or _has_own_schedule(config):
            self.schedule = schedule  # others follow from the update's number, even if their settings may change
        self.config, self.samples, self.table = config, samples, table
        self.bits = what_bits_depend_on(accelerator) if config.bitwise else {}
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
        changed = [key.removeprefix("optim.") for key in changes if key.startswith("optim.")]
        keep = tuple(name for key in changed for name in GROUP_SETTINGS.get(key, (key,)))
        if "name" in changed:
            self.notes.append("the checkpoint is of a different optimizer, so its state is not used")
            return RestorePlan(snapshot.state, position, None), snapshot
        return self.plan_with_optimizer(path, snapshot, position, keep)

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
        if snapshot.state["schedule"] is not None and self.schedule is not None:
            self.schedule.load_state_dict(snapshot.state["schedule"])  # here its errors are told of the file
        return position, changes

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


def _obstacle_at(
    position: TrainState, snapshot: Snapshot, path: Path, config: Config, samples: int, changes: Mapping[str, str]
) -> str:
    """Why a run with so many training samples cannot go on from `position`, even if all `changes` of settings are
    allowed; "" if it can."""
    if too_short := _too_short(position, path, config, samples):
        return too_short
    changed = [f"{key}: {changes[key]}" for key in (*SAMPLE_KEYS, "data") if key in changes]
    saved_samples = snapshot.state.get("samples", samples)
    if saved_samples != samples and "data" not in changes:
        changed.append(f"{saved_samples} -> {samples} training samples")
    if not (position.epoch_samples and changed):
        return ""
    return (
        f"{path} is in the middle of epoch {position.epoch + 1}, which has to be completed with the samples with "
        f"which it began ({'; '.join(changed)}). Give the old settings until the epoch is complete, or start with "
        "another --output-dir and --resume from a checkpoint at the end of an epoch."
    )


def _too_short(position: TrainState, path: Path, config: Config, samples: int) -> str:
    """Why a run of so many epochs or updates has no update `position`; "" if it has."""
    if samples < config.batch_size:  # that mistake is told elsewhere
        return ""
    plan = create_plan(config, samples, processes=1, accumulation=1, virtual_batch=1)
    done = plan.updates_until(position.epoch, position.epoch_samples)
    if done <= plan.updates:
        return ""
    by_updates = plan.updates == config.stop.updates
    end = f"--stop.updates {plan.updates}" if by_updates else f"--epochs {config.epochs:g}, {plan.updates} updates"
    return f"{end}: {done} updates are done in {path}. Give a later end, or start a new run with another --output-dir."


def _has_own_schedule(config: Config) -> bool:
    return parse_reference("schedule.name", config.schedule.name) is not None
