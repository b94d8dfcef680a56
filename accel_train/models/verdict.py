"""What the trial of a model (trial.py) says: what can be trained, and how; kept in the run's environment.json."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from accel_train.config.schema import Config
from accel_train.errors import UserError, first_of
from accel_train.files import read_json_object


@dataclass(frozen=True)
class Verdict:
    """What a trial has found. Each text names a module, a buffer or a parameter; empty: nothing was found."""

    together: str = ""
    """Why one pass over two virtual batches is not two passes over one each."""
    functions: bool = False
    """Whether the model must run inside `KeyedFunctions` in training."""
    state: bool = False
    """Whether a pass depends on the passes before it, though the generators are seeded."""
    initialised: str = ""
    """A parameter that a forward pass changes."""
    changing: tuple[str, ...] = ()
    """The buffers that each pass changes, such as "norm.running_mean (InstanceNorm2d)"."""
    evaluation: bool = False
    """Whether the output for a sample in evaluation depends on the others of its batch, or on random numbers."""
    leaves_out: bool = False
    """Whether a pass may leave out parameters."""
    untried: str = ""
    """Why the model could not be tried."""

    def obstacles(self) -> tuple[str, ...]:
        """What depends on the number of processes, though each pass is one virtual batch: with --bitwise an error."""
        found: list[str] = []
        if self.changing:
            found.append(
                f"model: each forward pass of training changes the buffer {first_of(self.changing, 1)}. Each process "
                "does so by its own samples, and the main process's values are kept. So the result depends on the "
                "number of processes. To avoid that, choose another model or normalisation."
            )
        if self.initialised:
            found.append(self._initialisation())
        elif self.state:
            found.append(
                "model: two forward passes with the same images and random numbers do not give the same. So it has a "
                "random generator of its own, or another state, which depends on the number of processes. Draw from "
                "the global generators of torch, NumPy or Python, or choose another model."
            )
        if self.evaluation:  # after what may be its reason
            found.append(
                "model: in evaluation the output for a sample depends on the others of its batch, as with a BatchNorm "
                "without running statistics (track_running_stats=False), or on random numbers. So the results depend "
                "on the number of processes. Choose another model or normalisation."
            )
        if self.untried:
            found.append(
                f"model: could not check whether a sample depends on the others of its micro-batch ({self.untried})"
            )
        return tuple(found)

    def check(self, config: Config, accelerator: Accelerator) -> None:
        """Raise UserError if the model cannot be trained as `config` says."""
        if config.bitwise and (obstacles := self.obstacles()):
            raise UserError(f"--bitwise: {obstacles[0]}")
        if self.initialised and accelerator.num_processes > 1:
            raise UserError(self._initialisation())

    def _initialisation(self) -> str:
        return (
            f"model: a forward pass of training changes the parameter {self.initialised}, as a data-dependent "
            "initialisation does: by the samples of one process. Initialise it before training, such as by "
            "--model.weights, or train on one process without --bitwise."
        )

    def prepare_ddp(self, accelerator: Accelerator) -> None:
        """Set what DDP has to know of the model. Call it before `Accelerator.prepare`."""
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = self.leaves_out
            # Processes with different buffers would not go on in the same way after a restart: all use the main's.
            accelerator.ddp_handler.broadcast_buffers = bool(self.changing)


def read_verdict(run: Path) -> Verdict | None:
    """What the trial of `run` has found; None if its file does not say it."""
    try:
        kept = read_json_object(run / "environment.json").get("trial")
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or kept.keys() != {each.name for each in fields(Verdict)}:
        return None
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()}
    verdict, empty = Verdict(**values), Verdict()
    same_types = all(type(getattr(verdict, each.name)) is type(getattr(empty, each.name)) for each in fields(Verdict))
    return verdict if same_types and all(isinstance(text, str) for text in verdict.changing) else None


def refuse_sync_batchnorm(model: nn.Module) -> None:
    """Raise UserError if `model` has a SyncBatchNorm: its statistics depend on how the processes divide a batch."""
    synced = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        raise UserError(
            f"model: {first_of([f'{name} (SyncBatchNorm)' for name in synced])} normalises by the samples of all "
            "processes. Use a BatchNorm instead: it normalises virtual batches, the same on any number of processes."
        )


def raise_unused_parameters_advice(error: Exception) -> None:
    """Raise UserError if `error` is DDP's for parameters that a pass has left out, unseen in the trial."""
    if "Expected to have finished reduction in the prior iteration" in str(error):
        raise UserError(
            "model: an update did not use some of the parameters, although the passes that were tried at the start "
            "used them all. Let each pass use all parameters, or give --bitwise true, which does not need that.",
            every_process=False,
        ) from error
