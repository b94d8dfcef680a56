"""The promises of the trainer for a loop of your own on Accelerate. EXPERIMENTAL: a later version may change all of it.

`accel-train train` uses the same classes and functions: here are those that know nothing of classes and recipes, with a
few lines around them. docs/from_python.md explains them, and examples/segmentation.py is a whole program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from accel_train.checkpoint.directory import Snapshot
from accel_train.checkpoint.state import TrainState, check_same_model, named_tensors
from accel_train.checkpoint.store import CheckpointStore, RestorePlan
from accel_train.data.order import EvaluationSampler, IndexBatch, Plan, TrainingSampler, accumulation_steps
from accel_train.errors import LOGGER, UnsavedError, UserError, first_of, print_logged
from accel_train.exact_sum import ExactGradients, exact_sum
from accel_train.keyed import hashed, key, seed_pass, uniform, uniforms
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.agreement import broadcast_from_main, check_agreement, check_shared_directory, end_world
from accel_train.launch.environment import prepare_environment, print_error
from accel_train.launch.stopping import StopAskedError, StopRequests
from accel_train.models.batchnorm import VirtualBatches, has_batchnorm
from accel_train.optim.bitwise import compute_deterministically, what_bits_depend_on
from accel_train.optim.performance import set_defaults
from accel_train.ownership.claim import Claim, claim_run
from accel_train.ownership.owner import LostError

__all__ = [
    "EvaluationSampler", "ExactGradients", "IndexBatch", "LostError", "Plan", "StopAskedError", "StopRequests",
    "TrainState", "TrainingSampler", "UnsavedError", "UserError", "VirtualBatches", "connect", "exact_sum", "hashed",
    "key", "open_run", "run_program", "seed_pass", "share_batch", "uniform", "uniforms",
]  # fmt: skip


def connect() -> Accelerator:
    """The Accelerator of the processes that the launcher has started. It computes deterministically, on one thread or
    on OMP_NUM_THREADS, and gives each process its slice of each batch. Raises UserError if processes are missing."""
    accelerator = create_accelerator(prepare_environment(bitwise=True))
    set_defaults(accelerator.device)
    compute_deterministically(accelerator)
    return accelerator


def share_batch(accelerator: Accelerator, samples: int, batch_size: int, virtual_batch: int) -> Plan:
    """How an update of `batch_size` samples is shared by all processes, out of `samples` an epoch.

    One forward pass has one virtual batch of `virtual_batch` samples: the same shapes on any number of processes, so
    the same kernels and the same bits. Raises UserError if that is impossible.
    """
    processes, why = accelerator.num_processes, f"in virtual batches of {virtual_batch}"
    steps = accumulation_steps(batch_size, processes, virtual_batch, unit=virtual_batch, why=why)
    return Plan(samples, batch_size, processes, steps, virtual_batch=virtual_batch)


def run_program(main: Callable[[], None]) -> int:
    """Call `main` and return the program's exit code; a UserError is one line on stderr, without a traceback."""
    print_logged()
    try:
        main()
    except UserError as error:
        print_error(error, Path(sys.argv[0]).name)
        return error.code
    end_world()
    return 0


@contextmanager
def open_run(
    directory: Path,
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    requests: StopRequests,
    plan: Plan,
    *,
    take_over: bool = False,
    **settings: Any,
) -> Iterator[tuple[Checkpoints, TrainState]]:
    """Own the run's directory within the `with` block, and give its checkpoints and the position to go on from: that
    of the newest complete checkpoint, restored into `model` and `optimizer`, or that of a new run.

    Collective. `model` and `optimizer`: as Accelerate prepared them. `take_over`: from another process that owns the
    directory, alive or not; that process ends. `settings`: the seed, and what else decides what is learned, fit for
    JSON; a run with other ones does not go on, so leave out what may change, such as the epochs. Raises UserError if
    another process owns the directory, it cannot be written, or its checkpoint does not fit.
    """
    if not accelerator.split_batches:
        raise UserError("The processes would get whole batches in turn: create the Accelerator with parts.connect().")
    if has_batchnorm(model):
        raise UserError(
            "The model has a BatchNorm, whose statistics depend on how many processes share an update. Convert it "
            "with parts.VirtualBatches before Accelerate prepares it, or use GroupNorm."
        )
    decided = {"samples": plan.samples, "batch_size": plan.batch_size, "virtual_batch": plan.virtual_batch}
    decisive = json.dumps(settings | decided | {"program": "accel_train.parts"}, sort_keys=True)
    check_agreement(accelerator, settings=decisive, **what_bits_depend_on(accelerator))
    claim = Claim(directory, lambda: requests.reason, take_over=take_over, how="open_run(…, take_over=True)")
    lease = claim_run(accelerator, claim)
    with ExitStack() as around:
        around.callback(lease.release)
        run = Checkpoints(directory / "checkpoints", accelerator, model, optimizer, lease)
        run.description = {"configuration": json.loads(decisive)}
        around.callback(run.wait)  # before the ownership is released
        check_shared_directory(accelerator, directory)
        broadcast_from_main(accelerator, run.check_writable)
        requests.begin(directory if accelerator.is_main_process else None, 0.0, connect_seconds=600.0)
        state = run.restore() or TrainState()
        for note in run.notes:
            LOGGER.warning(note)
        broadcast_from_main(accelerator, lambda: lease.begin(state.update))
        yield run, state
        requests.end()  # not after an error: the other processes may not come


class Checkpoints(CheckpointStore):
    """The checkpoints of a loop of one's own: `save` and `publish_weights`. `open_run` makes it."""

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Save a checkpoint of `state` in the background, or `wait` until it is on the disk. Collective. A save that
        fails is a warning, and with `wait` an UnsavedError on all processes."""
        broadcast_from_main(self.accelerator, self.lease.check)
        super().save(state, wait=wait)
        if wait:
            kept = broadcast_from_main(self.accelerator, lambda: "" if self.last_saved == state.update else self.kept)
            if kept:
                what = f"The checkpoint of update {state.update}"
                raise UnsavedError(f"{what} could not be written to {self.folder}. Kept: {kept}.")

    def wait(self) -> None:
        """Wait until the last save is done, and warn if it has failed."""
        super().wait()
        while self.failures:
            LOGGER.warning("not saved: %s", self.failures.pop(0))

    def _match(self, path: Path, snapshot: Snapshot, allow: Sequence[str]) -> tuple[RestorePlan, Snapshot]:
        before, settings = snapshot.state["configuration"], self.description["configuration"]
        pairs = {name: (before.get(name), settings.get(name)) for name in settings | before}
        if changes := [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]:
            what = f"{path} was made with other settings: {first_of(changes)}"
            raise UserError(f"{what}. Give the old ones, or another --output-dir.")
        position = TrainState.from_saved(snapshot.state["train"], path)
        check_same_model(named_tensors(self.model), snapshot.model, path)
        return self.plan_with_optimizer(path, snapshot, position)
