"""How a start of a run ends, finished or interrupted: all it should leave is written, or UnsavedError is raised."""

from __future__ import annotations

import time

from accel_train.errors import UnsavedError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import INTERRUPTED, at_terminal
from accel_train.records.cost.summary import cost_of
from accel_train.run.run import Run


def finish(run: Run) -> int:
    """End a run that is trained and tested; return the exit code.

    Raises UnsavedError, on the main process only, if the final weights or the result could not be written.
    """
    checkpoints, directory, log = run.checkpoints, run.directory, run.log
    run.stop_requests.end()
    log.warn_of_failed_saves(checkpoints)
    if run.is_main and checkpoints.last_saved != run.state.update:
        raise UnsavedError(log.log_unsaved_end(checkpoints, run.resume_command))
    run.ledger.end(finished=True)
    times = {"wall_seconds": time.monotonic() - run.began, "cost": cost_of(run.ledger.starts)}
    if problem := log.log_end(run.state, run.evaluations, run.stopwatch, times):
        problem += f" After freeing space: {run.resume_command}"
        run.console.warn(problem)
    if problem := problem or checkpoints.unpublished:
        raise UnsavedError(problem)
    return 1 if checkpoints.failures or directory.failures else 0


def interrupt(run: Run) -> int:
    """Save and end a run that was asked to stop; return the exit code.

    Raises UnsavedError, on all processes, if the checkpoint could not be written.
    """
    run.save(wait=True)
    run.stop_requests.end()
    run.ledger.end(finished=False)
    reason = run.stop_requests.reason or "another process's signal"

    def write() -> tuple[str, int]:
        problem = run.log.log_interruption(run.state, reason, run.checkpoints, run.resume_command)
        return problem, 1 if problem or run.checkpoints.failures or run.directory.failures else 0

    problem, code = broadcast_from_main(run.accelerator, write)
    run.accelerator.wait_for_everyone()  # if one process left first, its launcher would end the others
    if reason == "SIGINT" and at_terminal():
        code = INTERRUPTED
    if problem:
        raise UnsavedError(problem, code=code)
    return code
