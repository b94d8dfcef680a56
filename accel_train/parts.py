"""The promises of the trainer for a loop of your own on Accelerate. EXPERIMENTAL: a later version may change all of it.

`accel-train train` uses the same classes and functions: here are those that know nothing of classes and recipes, with a
few lines around them. docs/from_python.md explains them, and examples/segmentation.py is a whole program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from accel_train.checkpoint.directory import Snapshot
from accel_train.checkpoint.reading import check_same_model
from accel_train.checkpoint.state_dict import named_tensors, outline
from accel_train.checkpoint.store import CheckpointStore, RestorePlan
from accel_train.checkpoint.train_state import TrainState
from accel_train.data.order.plan import Plan, accumulation_steps, virtual_batch_size
from accel_train.data.order.samplers import EvaluationSampler, IndexBatch, IndexSampler, TrainingSampler
from accel_train.data.workers import no_collate
from accel_train.errors import LOGGER, UnsavedError, UserError, first_of, print_logged
from accel_train.exact_sum import ExactGradients, exact_sum
from accel_train.keyed import hashed, key, permuted, uniform, uniforms
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main, check_agreement, check_shared_directory, end_world
from accel_train.launch.environment import INTERRUPTED, prepare_environment, print_error
from accel_train.models.batchnorm import VirtualBatches, has_batchnorm
from accel_train.optim.bitwise import compute_deterministically, seed_pass, what_bits_depend_on
from accel_train.optim.performance import set_defaults
from accel_train.ownership.lease import Claim, Lease, LostError, cannot_be_written, claim_run
from accel_train.run.stopping import StopAskedError, StopRequests

__all__ = [
    "Checkpoints", "EvaluationSampler", "ExactGradients", "IndexBatch", "LostError", "Plan", "StopAskedError",
    "StopRequests", "TrainState", "TrainingSampler", "UnsavedError", "UserError", "VirtualBatches",
    "compute_deterministically", "connect", "create_loader", "exact_sum", "hashed", "key", "permuted", "run_program",
    "seed_pass", "share_batch", "uniform", "uniforms",
]  # fmt: skip

PROGRAM = "accel_train.parts"  # what state.json says of who wrote it
CONNECT_SECONDS = 600.0  # for the group of processes that agree on when to stop


def connect(**options: Any) -> Accelerator:
    """The Accelerator of the processes that the launcher has started. It computes deterministically, on one thread or
    on OMP_NUM_THREADS. `options`: see `create_accelerator`. Raises UserError if processes are missing, or are alone.
    """
    accelerator = create_accelerator(prepare_environment(bitwise=True), **options)
    set_defaults(accelerator.device)
    compute_deterministically(accelerator)
    return accelerator


def share_batch(accelerator: Accelerator, samples: int, batch_size: int, virtual_batch: int | None = None) -> Plan:
    """How an update of `batch_size` samples is shared by all processes, out of `samples` an epoch.

    One forward pass has one virtual batch of `virtual_batch` samples (default: see `virtual_batch_size`): the same
    shapes on any number of processes, so the same kernels and the same bits. Raises UserError if that is impossible.
    """
    unit = virtual_batch or virtual_batch_size(batch_size, batchnorm=False, pairs=False)
    processes = accelerator.num_processes
    steps = accumulation_steps(batch_size, processes, unit, unit=unit, why=f"in virtual batches of {unit}")
    return Plan(samples, batch_size, processes, steps, False, unit)


def create_loader(
    accelerator: Accelerator, dataset: Dataset[Any], sampler: IndexSampler, **options: Any
) -> DataLoader[Any]:
    """A DataLoader that gives each process its slice of each global micro-batch of `sampler`, on its device.

    `dataset` has a method `__getitems__`, which gets an IndexBatch and returns the batch, such as a dict of tensors.
    `options`: of torch's DataLoader, such as num_workers. Raises UserError if `accelerator` would not divide batches.
    """
    if not accelerator.split_batches:
        raise UserError(
            "The processes would get whole batches in turn, not their slices of each batch. Create the Accelerator "
            "with parts.connect(), or with dataloader_config=DataLoaderConfiguration(split_batches=True)."
        )
    # An IndexBatch in place of a list of indices.
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, collate_fn=no_collate, **options)  # type: ignore[arg-type]
    prepared: DataLoader[Any] = accelerator.prepare_data_loader(loader)
    return prepared


def run_program(main: Callable[[], None]) -> int:
    """Call `main` and return the program's exit code; a UserError is one line on stderr, without a traceback."""
    print_logged()
    try:
        main()
    except UserError as error:
        print_error(error, Path(sys.argv[0]).name)
        return error.code
    except KeyboardInterrupt:  # the second Ctrl-C, or before there is something to save
        return INTERRUPTED
    end_world()
    return 0


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
        take_over: bool = False,
    ) -> None:
        """`model` and `optimizer`: as Accelerate prepared them. `settings`: what else decides what is learned, fit for
        JSON; a run with other ones does not go on here, so leave out what may change, such as the number of epochs.
        `save_every_seconds`: how often `requests.poll` asks for a save; 0: never.
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
        super().__init__(self.directory / "checkpoints", accelerator, model, optimizer, lease=lease)

    def __enter__(self) -> Checkpoints:
        accelerator, is_main = self.accelerator, self.accelerator.is_main_process
        bits = what_bits_depend_on(accelerator) if torch.are_deterministic_algorithms_enabled() else {}
        check_agreement(accelerator, settings=json.dumps(self.settings, sort_keys=True), **bits)
        self.description = {"program": PROGRAM, "configuration": self.settings}
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

    def wait(self) -> None:
        """Wait until the last save is done, and warn if it has failed."""
        super().wait()
        for line in self.failures[self._warned :]:
            LOGGER.warning("not saved: %s", line)
        self._warned = len(self.failures)

    def _check_saved(self, update: int) -> None:
        if self.last_saved != update:
            raise UnsavedError(
                f"The checkpoint of update {update} could not be written to {self.folder}. Kept: {self.kept}."
            )

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
        optimizer = self.matching_optimizer(path, snapshot, position, ())
        plan = RestorePlan(saved, position, outline(optimizer))
        return plan, Snapshot(snapshot.model, None, optimizer, saved)
