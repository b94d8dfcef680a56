"""Checkpoints of a run: saved in the background, found and restored on any number of processes.

A checkpoint is a directory, `checkpoints/update-00001234/` in the run's directory. `commit` says what makes
it whole, `snapshot` what is in it, `full_state` how it comes from and to many processes, `changes` which
settings may differ.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from accel_train.checkpoint import directory as commit
from accel_train.checkpoint import state_dict as full_state
from accel_train.checkpoint.directory import BrokenError
from accel_train.checkpoint.format import Snapshot, check_fit, read, read_weights, verify, versions, write
from accel_train.checkpoint.optimizer_check import MisfitError, fitting
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.compatibility import OF_SAMPLES, compare, differences, digest, flat
from accel_train.config.schema import Config, as_dict
from accel_train.config.semantics import IN_MEMORY, SEMANTICS, check_same_division, check_same_pixels
from accel_train.data.order.plan import Plan
from accel_train.errors import UserError
from accel_train.launch.consensus import decided_by_main
from accel_train.ownership.lease import Lease, LostError
from accel_train.untrusted import NotOrdinaryError, is_count, read_ordinary

# The settings of an optimizer's parameter groups that follow from a key of another name.
GROUP_SETTINGS = {"lr": ("lr", "initial_lr"), "weight-decay": ("weight_decay",), "layer-decay": ("lr_scale",)}


@dataclass(frozen=True)
class Decision:
    """What all processes have to know to restore a checkpoint that only the main process reads."""

    state: dict[str, Any]
    position: TrainState
    optimizer: dict[str, Any] | None
    """The outline of the optimizer's state; None: it starts anew."""
    keep: tuple[str, ...]
    """Settings of its parameter groups that are this run's, not the checkpoint's."""


class Checkpoints:
    """The checkpoints of one run. Every process has one; only the main process writes and reads.

    What the main process knows (the writing thread appends to `failures`: read it whenever it suits):

    failures        one line for each save that came to nothing; the older checkpoints stay whole
    notes           one line for each thing that the user should know of a restore
    last_saved      update of the newest checkpoint that is whole on the disk, or None
    last_seconds    time that the last save took until then
    stalled_seconds time that it held up training
    """

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
        pixels: int = IN_MEMORY,
    ) -> None:
        """`folder`: where the checkpoints lie; its parent, the run's directory, must be there when one is
        saved. `samples`: number of training samples.

        `model` and `optimizer` are as Accelerate prepared them. `ema`: timm's ModelEmaV3 around the same
        model, or the module in it. `schedule`: a learning rate that depends on more than the update's
        number; its state must be fit for JSON. `lease`: looked at before anything is changed there. `pixels`: the
        number by which the data's are made (`Splits.semantics`).
        """
        self.folder, self.config, self.accelerator = folder, config, accelerator
        self.model, self.samples = model, samples
        self.lease = lease or Lease(folder.parent, None)
        # All the others follow from the update's number, also if their settings are allowed to change.
        self.schedule = schedule if config.schedule.name == "plateau" else None
        self.pixels = pixels
        self.ema: nn.Module | None = getattr(ema, "module", ema)
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.last_saved: int | None = None
        self.last_seconds = self.stalled_seconds = 0.0
        self._writer: threading.Thread | None = None
        self._source: tuple[Path, Snapshot] | None = None

    def check_writable(self) -> None:
        """Raise UserError if no checkpoint can be written here. Before training, on the main process."""
        try:
            commit.probe(self.folder)
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"{self.folder} is not a folder, so no checkpoint can be written. "
                "Remove it, or give another --output-dir."
            ) from None
        except OSError as error:
            raise UserError(
                f"No checkpoint can be written in {self.folder} ({error.strerror}){self._free_space()}. "
                "Make room there, or give another --output-dir."
            ) from None

    def newest(self) -> Path | None:
        """The newest whole checkpoint of this run, as far as the main process knows; None if there is none."""
        if self.last_saved is None:
            return None
        path = commit.directory(self.folder, self.last_saved)
        return path if path.is_dir() else None  # somebody may have moved it away

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Save a checkpoint of `state`. Collective: all processes call it at the same update.

        It returns when the copy in host memory is made; a thread of the main process writes it, and `wait`
        waits for that, too. What goes wrong on the disk is put into `failures`, not raised. The checkpoint
        of `state.best_update` is kept as the best: save after an evaluation, not before.
        """
        started = time.perf_counter()
        self.wait()
        here: bool = self.accelerator.is_main_process
        model = full_state.tensors(self.model)
        ema = None if self.ema is None else full_state.tensors(self.ema)
        optimizer = full_state.optimizer_state(self.model, self.optimizer)
        model, ema, optimizer = full_state.collect((model, ema, optimizer), here=here)
        if here:
            copy = Snapshot(model, ema, optimizer, self._describe(state))
            # Not a daemon: if the program ends by an error, this checkpoint is completed all the same.
            self._writer = threading.Thread(target=self._write, args=(copy, started), name="checkpoint")
            self._writer.start()
            self.stalled_seconds = time.perf_counter() - started
            if wait:
                self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way. The program does not end before it."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Wait until the last save has come to its end. Not collective: only the main process writes."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def publish(self, update: int) -> None:
        """Copy the weights of the checkpoint of `update` into the run's directory, where they are easily found."""
        if not self.accelerator.is_main_process:
            return
        self.wait()
        self._check_owner()
        try:
            for weights in sorted(commit.directory(self.folder, update).glob("*.safetensors")):
                aside = self.folder.parent / f".{weights.name}.tmp"
                shutil.copyfile(weights, aside)
                aside.replace(self.folder.parent / weights.name)
        except OSError as error:
            self.failures.append(f"the final weights are only in {self.folder}: {error}")

    def restore(self, resume: str, allow_change: Sequence[str] = ()) -> TrainState | None:
        """Restore model, optimizer, EMA, loss scaler and schedule; return the position, or None for a new
        run.

        Collective; at the start and, to go back, at any time: the main process clears up what a killed run left, and
        decides for all. Only its disk needs to have the checkpoints. `resume`:

        auto   the newest whole checkpoint of this run, if there is one
        must   the same; UserError if there is none
        never  UserError if there are checkpoints: two runs in one directory would be mixed
        PATH   a checkpoint, or the newest whole one in a run's directory. If it is of another run and this
        run has
               checkpoints of its own, these count: a job that is started again goes on where it was

        A broken checkpoint of this run is renamed aside, and the one before is used. `allow_change` names
        settings that may differ from the checkpoint's although they alter what is learned; see `changes`.
        Raises UserError, the same on all processes.
        """
        self.wait()
        decision = decided_by_main(self.accelerator, lambda: self._decide(resume, allow_change))
        if decision is None:
            return None
        model = ema = optimizer = None  # only the main process has them
        if self._source is not None:
            source = self._source[1]
            # A run that had no running mean of the weights starts one from the weights.
            model, ema, optimizer = source.model, source.ema or source.model, source.optimizer
            self._source = None
        full_state.spread(full_state.tensors(self.model), model)
        if self.ema is not None:
            full_state.spread(full_state.tensors(self.ema), ema)
        if decision.optimizer is not None:
            full_state.spread_optimizer(self.model, self.optimizer, decision.optimizer, optimizer, decision.keep)
        if decision.state["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(decision.state["scaler"])
        if decision.state["schedule"] is not None and self.schedule is not None:
            self.schedule.load_state_dict(decision.state["schedule"])
        return decision.position

    def _decide(self, resume: str, allow: Sequence[str]) -> Decision | None:
        """On the main process: what to restore, or None for a new run. Sets `_source`."""
        compare({}, Config(), allow)  # a wrong key is wrong in a new run, too
        try:
            self._source = self._choose(resume)
        except OSError as error:
            raise UserError(f"The checkpoints in {self.folder} cannot be read: {error}") from None
        if self._source is None:
            return None
        path, source = self._source
        saved = source.state["configuration"]
        samples = source.state.get("samples", self.samples), self.samples
        found = differences(saved, self.config, samples)
        position = self._position(path, source, found)
        obstacle = self._obstacle(path, source, position, found)
        compare(saved, self.config, allow, samples=samples, obstacle=obstacle)
        check_same_pixels(str(path), source.state.get("pixels", IN_MEMORY), self.pixels)
        check_same_division(str(path), source.state.get("semantics", 1), saved.get("data", {}))
        if source.ema is not None and self.ema is not None:
            check_fit(full_state.tensors(self.ema), source.ema, path)
        self._check_schedule(source.state["schedule"], path)
        if path.parent.resolve() == self.folder.resolve():
            self.last_saved = position.update
        if path.parent != self.folder:
            self.notes.append(f"goes on from {path}")
        self.notes += [f"changed since the checkpoint: {key}: {change}" for key, change in found.items()]
        self.notes += [
            f"changed since the checkpoint: {name} {old} -> {new}"
            for name, new in versions().items()
            if (old := source.state["versions"].get(name)) != new
        ]
        changed = [key.removeprefix("optim.") for key in found if key.startswith("optim.")]
        keep = tuple(name for key in changed for name in GROUP_SETTINGS.get(key, (key,)))
        outline = None
        if "name" in changed:
            self.notes.append("the optimizer is not the checkpoint's: it starts anew")
        else:
            source = dataclasses.replace(source, optimizer=self._fitting_optimizer(source, position, path, keep))
            self._source = path, source
            outline = full_state.outline(source.optimizer)
        return Decision(source.state, position, outline, keep)

    def _fitting_optimizer(
        self, source: Snapshot, position: TrainState, path: Path, keep: Sequence[str]
    ) -> dict[str, Any]:
        """The state of the optimizer, as far as this run's takes it. Raises UserError if they do not fit."""
        trained = position.update > len(position.left_out)
        try:
            found, missing = fitting(self.model, self.optimizer, source.optimizer, keep)
            # With a loss scaler the first updates often are not finite, and leave no state.
            if missing and not found["state"] and not keep and trained and not source.state["scaler"]:
                raise MisfitError(f"it has no state of any parameter after {position.update} updates")
        except MisfitError as error:
            raise UserError(
                f"{path / 'optimizer.pt'} does not fit this run's optimizer: {error}. If you do not trust it, delete "
                f"{path}; the checkpoint before it is used then."
            ) from None
        if missing and trained:
            self.notes.append(
                f"{path / 'optimizer.pt'} has no state of {len(missing)} parameters, such as {missing[0]}: the "
                "optimizer starts anew for them"
            )
        return found

    def _check_schedule(self, saved: dict[str, Any] | None, path: Path) -> None:
        try:
            if saved is not None and self.schedule is not None:
                self.schedule.load_state_dict(saved)
        except (LookupError, TypeError, ValueError):
            found = ", ".join(saved or {}) or "nothing"
            raise UserError(f"{path / 'state.json'}: schedule has {found}: that is not this run's schedule.") from None

    def _position(self, path: Path, source: Snapshot, found: Mapping[str, str]) -> TrainState:
        """Where the checkpoint is; `found` are the differences of this run's settings to its own."""
        saved = source.state["train"]
        position = TrainState.from_saved(saved, path)
        if not found.keys().isdisjoint({*OF_SAMPLES, "data", "batch-size", "data.drop-last"}):
            # Updates that are still to come, and are to be left out, have other samples now.
            position.left_out = [update for update in position.left_out if update <= position.update]
        if "epoch_samples" not in saved:  # older versions counted updates, all of one size
            position.epoch_samples = position.epoch_count
            if found.keys().isdisjoint(OF_SAMPLES):
                old = {**flat(as_dict(Config())), **flat(source.state["configuration"])}
                if not is_count(old["batch-size"], 1):
                    raise self._misplaced(position, path)
                plan = Plan(self.samples, old["batch-size"], 1, 1, bool(old["data.drop-last"]))
                updates = position.update - position.epoch * plan.updates_per_epoch
                if not 0 <= updates <= plan.updates_per_epoch:
                    raise self._misplaced(position, path)
                position.epoch_samples = min(updates * plan.batch_size, self.samples)
            position.epoch_left_out = position.epoch_samples - position.epoch_count
            if position.epoch_left_out < 0:
                raise self._misplaced(position, path)
        return position

    def _misplaced(self, position: TrainState, path: Path) -> UserError:
        return UserError(
            f"{path} does not fit the training data, which has {self.samples} samples: update {position.update} is not "
            f"in epoch {position.epoch + 1} of it. Has the data changed?"
        )

    def _obstacle(self, path: Path, source: Snapshot, position: TrainState, found: Mapping[str, str]) -> str | None:
        """Why the run cannot go on from the checkpoint, even if all changes of settings are allowed."""
        under_way = position.epoch_samples > 0
        if self.config.epochs < position.epoch + under_way:
            least = position.epoch + under_way
            state = f"epoch {least} is under way" if under_way else f"{least} epochs are done"
            return (
                f"--epochs {self.config.epochs}: {state} in {path}. Give at least {least}, or start a new run with "
                "another --output-dir."
            )
        changed = [f"{key}: {found[key]}" for key in (*OF_SAMPLES, "data") if key in found]
        then = source.state.get("samples", self.samples)
        if then != self.samples and "data" not in found:
            changed.append(f"{then} -> {self.samples} training samples")
        if under_way and changed:
            ends = [
                update for update in commit.updates(path.parent) if _epochs_done(commit.directory(path.parent, update))
            ]
            instead = f": --resume {commit.directory(path.parent, ends[-1])}" if ends else ", if there is one"
            return (
                f"{path} is in the middle of epoch {position.epoch + 1}, which ends with the samples that it began "
                f"with ({'; '.join(changed)}). Give the old settings until it is over, or start in another "
                f"--output-dir from a checkpoint that ends an epoch{instead}."
            )
        try:
            check_fit(full_state.tensors(self.model), source.model, path)
        except UserError as misfit:
            return f"{misfit} Give the old settings, or start a new run with another --output-dir."
        return None

    def _choose(self, resume: str) -> tuple[Path, Snapshot] | None:
        """On the main process: the checkpoint to restore, or None for a new run. Raises OSError."""
        self._check_owner()
        commit.tidy(self.folder)
        if resume == "never" and commit.updates(self.folder):
            raise UserError(f"{self.folder} has checkpoints, and --resume is never. Give another --output-dir.")
        own = self._newest()
        if resume == "must" and own is None:
            raise UserError(f"{self.folder} has no whole checkpoint, and --resume is must.")
        if resume in ("auto", "must", "never"):
            return own
        named, folder = Path(resume), self.folder.resolve()
        if own is None:
            return _named(named)
        if named.resolve().parent == folder and named.resolve() != own[0].resolve():
            raise UserError(
                f"{named} is not the newest checkpoint of this run: {own[0].name} is. "
                "To go on from an older one, give a new --output-dir."
            )
        if folder not in (named.resolve(), named.resolve().parent, named.resolve() / "checkpoints"):
            self.notes.append(f"this run has checkpoints of its own: {named}, which it began with, is not used")
        return own

    def _newest(self) -> tuple[Path, Snapshot] | None:
        """The newest whole checkpoint of this run; broken ones are renamed aside."""
        for update in reversed(commit.updates(self.folder)):
            path = commit.directory(self.folder, update)
            try:
                return path, read(path)
            except BrokenError as error:
                aside = commit.set_aside(path)
                self.notes.append(f"broken checkpoint: {error}; renamed to {aside.name}, the one before counts")
        return None

    def _describe(self, state: TrainState) -> dict[str, Any]:
        """The contents of state.json."""
        scaler = self.accelerator.scaler
        return {
            "train": state.to_saved(),
            "seed": self.config.seed,
            "samples": self.samples,
            "configuration": as_dict(self.config),
            "configuration_digest": digest(self.config),
            "versions": versions(),
            "semantics": SEMANTICS,
            "pixels": self.pixels,
            "processes": self.accelerator.num_processes,
            "scaler": None if scaler is None else scaler.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
        }

    def _write(self, copy: Snapshot, started: float) -> None:
        """In the thread: write a checkpoint, then delete those that need not be kept."""
        update, best = copy.state["train"]["update"], copy.state["train"]["best_update"]
        try:
            commit.commit(self.folder, update, lambda folder: write(folder, copy), check=self._check_owner)
            self.last_saved = update
            self.last_seconds = time.perf_counter() - started
            found = {u: _epochs_done(commit.directory(self.folder, u)) for u in commit.updates(self.folder)}
            settings = self.config.checkpoint
            kept = commit.survivors(found, settings.keep, best, settings.milestone_epochs)
            for old in sorted(found.keys() - kept):
                self._check_owner()
                commit.delete(self.folder, old)
        except LostError:
            pass  # the main thread hears of it before its next write
        except Exception as error:  # for a full disk, safetensors and torch.save have errors of their own
            self.failures.append(f"checkpoint of update {update}: {type(error).__name__}: {error}{self._free_space()}")

    def _check_owner(self) -> None:
        """Raise LostError if another start has taken the run over."""
        self.lease.check(fresh=True)

    def _free_space(self) -> str:
        """For the message of a failed save: torch.save's own does not say that the disk is full."""
        try:
            return f" ({shutil.disk_usage(self.folder.parent).free / 2**20:,.0f} MiB are free there)"
        except OSError:
            return ""


def find(run: Path) -> Path | None:
    """The newest whole checkpoint in a run's directory (or in its folder of checkpoints); nothing is
    changed there.

    Raises OSError if it cannot be read.
    """
    folder = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    for update in reversed(commit.updates(folder)):
        path = commit.directory(folder, update)
        try:
            verify(path)
        except BrokenError:
            continue
        return path
    return None


def load_weights(model: nn.Module, path: Path, *, ema: bool = False) -> None:
    """Load the weights of a checkpoint's directory, or of any safetensors file, into a model on any device.

    `ema`: those of the running mean. For a plain or a DDP model, on each process by itself. Raises
    UserError if the weights are not there, are broken or are another model's.
    """
    weights = read_weights(path, ema=ema)
    targets = full_state.tensors(model)
    check_fit(targets, weights, path)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])


def _named(path: Path) -> tuple[Path, Snapshot]:
    """The checkpoint that --resume names: itself, or the newest whole one of a run."""
    found = path if path.name.startswith("update-") else find(path)
    if found is None:
        raise UserError(f"--resume {path}: no whole checkpoint is there. Give the path of a checkpoint or a run.")
    try:
        return found, read(found)
    except BrokenError as error:
        raise UserError(f"--resume {path}: {error}. Take another checkpoint.") from None


def _epochs_done(checkpoint: Path) -> int | None:
    """The number of epochs that a checkpoint ends, or None if it is in the middle of one (or is broken)."""
    try:
        train = json.loads(read_ordinary(checkpoint / "state.json"))["train"]
        return None if train["epoch_count"] or train.get("epoch_samples") else int(train["epoch"])
    except (FileNotFoundError, NotOrdinaryError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
