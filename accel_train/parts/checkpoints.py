"""The checkpoints of a loop of one's own, in a directory that it owns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from accel_train.checkpoint.format import Snapshot
from accel_train.checkpoint.state_dict import named_tensors, outline
from accel_train.checkpoint.store import CheckpointStore, RestorePlan
from accel_train.checkpoint.train_state import TrainState
from accel_train.checkpoint.weights import check_same_model
from accel_train.data.order.plan import Plan
from accel_train.errors import LOGGER, UnsavedError, UserError, first_of
from accel_train.launch.agreement import broadcast_from_main, check_agreement, check_shared_directory
from accel_train.models.batchnorm import has_batchnorm
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.ownership.claim import Claim, claim_run
from accel_train.ownership.lease import Lease, cannot_be_written
from accel_train.run.stopping import StopRequests

PROGRAM = "accel_train.parts"  # what state.json says of who wrote it
CONNECT_SECONDS = 600.0  # for the group of processes that agree on when to stop


class Checkpoints(CheckpointStore):
    """The checkpoints in the directory of a run. Within its `with` block this start alone owns the directory.

    Collective: all processes create it and make the same calls. Entering also begins to listen for requests to stop or
    save, and refuses with a UserError a directory that another process owns or that cannot be written. Leaving waits
    for the last save and gives up the ownership. The attributes `failures` and `last_saved`: see `CheckpointStore`.
    """

    def __init__(
        self,
        directory: str | Path,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        requests: StopRequests,
        plan: Plan,
        *,
        seed: int,
        settings: Mapping[str, Any] | None = None,
        save_every_seconds: float = 0.0,
        keep: int = 2,
        take_over: bool = False,
    ) -> None:
        """`model` and `optimizer`: as Accelerate prepared them. `settings`: what else decides what is learned, fit for
        JSON; a run with other ones does not go on here, so leave out what may change, such as the number of epochs.
        `save_every_seconds`: how often `requests.poll` asks for a save; 0: never. `keep`: so many of the newest.
        `take_over`: own the directory even if it has an owner that seems alive.
        """
        if has_batchnorm(model):
            raise UserError(
                "The model has a BatchNorm, whose statistics depend on how many processes share an update. Convert it "
                "with parts.VirtualBatches before Accelerate prepares it, or use GroupNorm."
            )
        self.directory, self.requests, self.plan = Path(directory), requests, plan
        self._save_every_seconds = save_every_seconds
        self._claim = Claim(self.directory, lambda: requests.reason, take_over=take_over, how="take_over=True")
        decided = {"seed": seed, "samples": plan.samples, "batch_size": plan.batch_size}
        decided |= {"virtual_batch": plan.virtual_batch, "drop_last": plan.drop_last}
        self.settings = json.loads(json.dumps({**(settings or {}), **decided}))
        self._around, self._warned = ExitStack(), 0
        lease = Lease(self.directory, None)
        super().__init__(self.directory / "checkpoints", accelerator, model, optimizer, lease=lease, keep=keep)

    def __enter__(self) -> Checkpoints:
        accelerator, is_main = self.accelerator, self.accelerator.is_main_process
        check_agreement(accelerator, settings=json.dumps(self.settings, sort_keys=True), **self._bits())
        self.description = {"program": PROGRAM, "configuration": self.settings, "bits": self._bits()}
        with ExitStack() as around:
            self.lease = claim_run(accelerator, self._claim)
            around.callback(self.lease.release)
            around.callback(self.wait)  # before the ownership is released
            check_shared_directory(accelerator, self.directory)
            broadcast_from_main(accelerator, self.check_writable)
            directory = self.directory if is_main else None
            self.requests.begin(directory, self._save_every_seconds, CONNECT_SECONDS)
            self._around = around.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else the other processes may not come
            self.requests.end()
        self._around.close()

    def restore(self, resume: str = "auto", allow_change: Sequence[str] = ()) -> TrainState:
        """Restore the newest complete checkpoint, on any number of processes; return its position, or that of a new
        run. Raises UserError if the checkpoint was made with other settings, of other data or of another model."""
        state = super().restore(resume, allow_change) or TrainState()
        broadcast_from_main(self.accelerator, lambda: self._begin(state.update))
        return state

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Save a checkpoint of `state` in the background; a save that fails is a warning. Collective.

        `wait`: until it is on the disk; raises UnsavedError, on all processes, if that fails.
        """
        broadcast_from_main(self.accelerator, self.lease.check)
        super().save(state, wait=wait)
        self.requests.saved()
        if wait:
            broadcast_from_main(self.accelerator, lambda: self._check_saved(state.update))

    def publish_weights(self, update: int) -> None:
        """Copy the weights of the checkpoint of `update` to model.safetensors in the directory. Collective.

        Raises UnsavedError, on all processes, if that fails.
        """
        broadcast_from_main(self.accelerator, lambda: self._publish(update))

    def _publish(self, update: int) -> None:
        super().publish_weights(update)
        if self.unpublished:
            raise UnsavedError(f"{self.unpublished}.")

    def wait(self) -> None:
        """Wait until the last save is done, and warn if it has failed."""
        super().wait()
        for line in self.failures[self._warned :]:
            LOGGER.warning("not saved: %s", line)
        self._warned = len(self.failures)

    def _check_saved(self, update: int) -> None:
        if self.last_saved != update:
            newest = "there is none" if self.last_saved is None else f"the newest one is of update {self.last_saved}"
            raise UnsavedError(f"The checkpoint of update {update} could not be written to {self.folder}; {newest}.")

    def _begin(self, update: int) -> None:
        """On the main process: say what was found, and record that this start trains from `update` on."""
        for note in self.notes:
            LOGGER.warning(note)
        try:
            self.lease.begin(update)
        except OSError as error:
            raise cannot_be_written(self.directory, error) from error

    def _match(self, path: Path, snapshot: Snapshot, allow: Sequence[str]) -> tuple[RestorePlan, Snapshot]:
        saved, before = snapshot.state, snapshot.state["configuration"]
        if saved.get("program") != PROGRAM:
            raise UserError(f"{path} is a checkpoint of another program. Give another --output-dir.")
        names = [name for name in {**before, **self.settings} if before.get(name) != self.settings.get(name)]
        if names := [name for name in names if name not in allow]:
            changes = first_of([f"{name}: {before.get(name)} -> {self.settings.get(name)}" for name in names])
            raise UserError(
                f"{path} was made with other settings: {changes}. Give the old ones, or another --output-dir."
            )
        position = TrainState.from_saved(saved["train"], path)
        check_same_model(named_tensors(self.model), snapshot.model, path)
        for name, value in self._bits().items():
            if (old := saved["bits"].get(name)) != value:
                self.notes.append(f"changed since the checkpoint: {name} {old} -> {value}: the bits may be others now")
        optimizer = self.matching_optimizer(path, snapshot, position, ())
        plan = RestorePlan(saved, position, outline(optimizer))
        return plan, Snapshot(snapshot.model, None, optimizer, saved)

    def _bits(self) -> dict[str, str]:
        return what_bits_depend_on(self.accelerator) if torch.are_deterministic_algorithms_enabled() else {}
