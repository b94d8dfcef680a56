"""`accel-train track RUN --to NAME`: sends what a run has written to a tracker, from a computer with a network."""

from __future__ import annotations

from pathlib import Path

from accelerate import PartialState
from filelock import FileLock, Timeout

from accel_train.checkpoint.directory import list_updates
from accel_train.config.options import parse
from accel_train.config.schema import Config
from accel_train.errors import UserError, reason_of
from accel_train.ownership.generation import read_result
from accel_train.ownership.owner import has_owner
from accel_train.records.trackers import check_trackers
from accel_train.records.trackers.curves import read_curves
from accel_train.records.trackers.services import create_service


def track(run: Path, name: str) -> str:
    """Send what is new of the run in the folder `run` to the tracker `name`. Returns how much that was, in words.

    Raises UserError if the run, while it trains, sends to this tracker itself, or if the tracker fails.
    """
    config = parse([str(run / "config.yaml")], checks_code=False)
    check_trackers([name], "--to")
    if name in config.trackers and has_owner(run):
        raise UserError(f"{run} is training, and sends its curves to {name} itself.")
    try:
        with FileLock(run / ".trackers.lock", timeout=0):
            return _send(config, run, name)
    except Timeout:
        raise UserError(f"Another process is sending the curves of {run}; try again later.") from None
    except OSError as error:
        raise UserError(f"{run}: cannot be read or written ({error.strerror}).") from error


def _send(config: Config, run: Path, name: str) -> str:
    PartialState(cpu=True)  # Accelerate's trackers ask it which process they are on
    # The checkpoints and the result first: what they make final is in the lines that are read after them.
    result, updates = read_result(run), list_updates(run / "checkpoints")
    is_finished = isinstance(result.get("updates"), int)
    points, saves = read_curves(run)
    position = (updates[-1], saves.get(updates[-1], 0)) if updates else (0, 0)
    final = [point for point in points if is_finished or point.is_final(position)]
    service = create_service(name, config, run)
    try:
        service.open(0, points)
        service.settle(final)
        if is_finished:
            service.finish(result, (run / "result.json").stat().st_mtime)
        service.close()
    except Exception as error:  # of the tracker's package
        raise UserError(f"{name}: {reason_of(error)}. Start it again to send the rest.", code=1) from error
    rest = len(points) - len(final)
    waits = f"; {rest} newer steps can be sent after the next checkpoint" if rest else ""
    return f"{name}: sent the curves of {run}, {len(final)} steps{waits}"
