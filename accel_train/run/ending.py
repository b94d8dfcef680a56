"""How a start of a run ends, finished or interrupted: all it should leave is written, or UnsavedError is raised."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_train.errors import UnsavedError, counted
from accel_train.launch.accelerator import precision
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.process import MARKER, start_folder
from accel_train.ownership.lease import Lease
from accel_train.records.cost import cost_of
from accel_train.records.directory import RunDirectory
from accel_train.records.events import Ended, Noted, Warned
from accel_train.records.summary import final_metrics, held_out_file, next_steps, result_of, stopped_text
from accel_train.run.run import Run
from accel_train.untrusted import read_json_object


@dataclass(frozen=True)
class TrainingResult(os.PathLike[str]):
    """How a training has ended: the same on all processes. It is also the path of the run's directory."""

    directory: Path
    finished: bool
    """False if it was asked to stop: the same call continues it."""
    stopped_by: str | None
    """Of a finished run "epochs", "updates", "patience" or "hours"; else what asked: "SIGUSR1", or "the file STOP"."""
    metrics: Mapping[str, Any]
    """Those of result.json; of a run that is not finished only its "epochs" and "updates"."""
    failed_writes: int = 0
    """Checkpoints and records that could not be written on the way; the console has warned of them."""
    nothing_left: bool = False
    """The run was finished before, and nothing was trained."""
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The objects of the program that were trained with: option ("model.name") -> object. Pickled, it has none."""

    def __repr__(self) -> str:
        ended = "finished" if self.finished else "not finished"
        shown = {name: self.metrics[name] for name in ("epochs", "updates") if name in self.metrics}
        test = {name: value for name, value in self.metrics.items() if name.startswith("test_")}
        shown |= {name: round(value, 4) for name, value in test.items() if isinstance(value, float)}
        values = "".join(f", {name}={value}" for name, value in shown.items())
        return f"TrainingResult({str(self.directory)!r}, {ended}, stopped_by={self.stopped_by!r}{values})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "objects": {}}

    def __fspath__(self) -> str:
        return str(self.directory)

    def __truediv__(self, name: str) -> Path:
        return self.directory / name


def finish(run: Run) -> TrainingResult:
    """End a run that is trained and tested. Collective.

    Raises UnsavedError, on all processes, if the final weights or the result could not be written.
    """
    run.stop_requests.end()
    return _end(run, _finish)


def interrupt(run: Run) -> TrainingResult:
    """Save and end a run that was asked to stop. Collective.

    Raises UnsavedError, on all processes, if the checkpoint could not be written.
    """
    run.save(wait=True)
    run.stop_requests.end()
    reasons = gather_object([run.stop_requests.reason])
    reason = next(filter(None, reasons), "another process's signal")
    return _end(run, partial(_interrupt, reason=reason))


def mark_finished(accelerator: Accelerator, lease: Lease, result: Mapping[str, Any]) -> None:
    """Write that the run is finished, if the start that wrote `result` was killed before it did so. Collective."""

    def write() -> None:
        before = read_json_object(lease.directory / "status.json")
        if lease.owner is None or before.get("state") == "finished":  # without an owner it cannot be written
            return
        now = {"epoch": math.ceil(result["epochs"]), "update": result["updates"], "eta_seconds": 0}
        directory = RunDirectory(lease.directory, writes=True, lease=lease)
        kept = {name: value for name, value in before.items() if name not in ("state", "reason")}
        directory.status("finished", **kept | now | {"last_checkpoint": result["updates"]})

    broadcast_from_main(accelerator, write)


def _end(run: Run, decide: Callable[[Run], TrainingResult | UnsavedError]) -> TrainingResult:
    outcome = broadcast_from_main(run.accelerator, lambda: decide(run))
    run.accelerator.wait_for_everyone()  # if one process left first, its launcher would end the others
    if isinstance(outcome, UnsavedError):
        raise outcome
    return outcome


def _finish(run: Run) -> TrainingResult | UnsavedError:
    checkpoints, config, state, splits = run.checkpoints, run.config, run.state, run.setup.splits
    folder = run.directory.path
    run.report_saves()
    if checkpoints.last_saved != state.update:
        reason = f"the final checkpoint could not be written; kept: {checkpoints.kept}"
        title = "The final weights could not be saved: the run is not finished."
        shown, commands = {"kept": checkpoints.kept, "run": str(folder)}, {"after freeing space": run.resume_command}
        run.emit(Ended(state.update, "failed", title, shown, commands, status={"reason": reason}))
        return UnsavedError(f"{title} Kept: {checkpoints.kept}. After freeing space: {run.resume_command}")
    problem = checkpoints.unpublished
    run.ledger.end(finished=not problem)
    last, task, epoch = run.evaluations, splits.task, state.current_epoch(config, run.setup.plan)
    result = result_of(config, run.setup.plan, len(splits.to_train_on), state, last, task) | {
        "precision": precision(run.accelerator),
        "warm_up_seconds": run.stopwatch.warm_up,  # like wall_seconds, of the last start
        "wall_seconds": time.monotonic() - run.began,
        "cost": cost_of(run.ledger.starts),
    }
    if not (problem or run.directory.result(result)):
        problem = f"{folder}/result.json could not be written"
    if problem:
        problem += ": the run is not finished."
    if stopped := stopped_text(config, run.setup.plan, state, task):
        run.emit(Noted(f"stopped: {stopped}", {"update": state.update}))
    epochs = f"{result['epochs']:g} of " * (result["stopped_by"] != "epochs") + counted(config.epochs, "epoch")
    run.emit(
        Ended(
            state.update,
            "failed" if problem else "finished",
            f"{config.recipe}: {epochs}, {counted(state.update, 'update')}",
            final_metrics(result, state, last, stopped, folder, task.evaluation_metrics(config.metrics)),
            next_steps(folder, held_out_file(splits)),
            status={"epoch": epoch, "eta_seconds": 0} | ({"reason": problem} if problem else {}),
            result=None if problem else result,
            stopped_by=result["stopped_by"],
        )
    )
    if problem:
        problem += f" After freeing space: {run.resume_command}"
        run.emit(Warned(problem))
        return UnsavedError(problem)
    return TrainingResult(folder, True, result["stopped_by"], result, _failed_writes(run))


def _interrupt(run: Run, *, reason: str) -> TrainingResult | UnsavedError:
    checkpoints, state, directory = run.checkpoints, run.state, run.directory
    run.ledger.end(finished=False)
    run.emit(Noted("interrupted", {"update": state.update, "reason": reason}))
    by = "Ctrl-C" if reason == "SIGINT" else reason
    stopped = f"Stopped by {by} after update {state.update} of {run.pace.total_updates}"
    newest, shown, problem = checkpoints.newest(), {"run": str(directory.path)}, ""
    if newest is not None and checkpoints.last_saved == state.update:
        title = f"{stopped}; nothing is lost."
        if not directory.ask_for_requeue(state.update):
            shown["job"] = f"{MARKER} could not be written: a job script will not start the run again"
    else:
        title = f"{stopped}, but this could not be saved."
        shown = {"kept": checkpoints.kept, **shown}
        # Without a checkpoint of its own this start made no progress, nor would the next: do not requeue for ever.
        if newest is not None and (checkpoints.last_saved or 0) > run.ledger.start.first_update:
            directory.ask_for_requeue(checkpoints.last_saved or 0)
        problem = f"{title} Kept: {checkpoints.kept}."
    commands = {"go on": run.resume_command}
    if start_folder() is not None and "SLURM_JOB_ID" in os.environ:
        commands = {}  # `accel-train after-job` says at the end of the job what follows, with the options of sbatch
    state_now, status = ("failed", {"reason": problem}) if problem else ("interrupted", {})
    run.emit(Ended(state.update, state_now, title, shown, commands, status=status, stopped_by=reason))
    if problem:
        return UnsavedError(problem, stopped_by=reason)
    metrics = {"epochs": run.setup.plan.epochs_until(state.epoch, state.epoch_samples), "updates": state.update}
    return TrainingResult(directory.path, False, reason, metrics, _failed_writes(run))


def _failed_writes(run: Run) -> int:
    return len(run.checkpoints.failures) + run.directory.failures
