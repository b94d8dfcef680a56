"""Opens a run at its beginning or at its newest checkpoint, and says what is trained."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console as RichConsole

from accel_train.checkpoint.manager import Checkpoints
from accel_train.checkpoint.train_state import TrainState
from accel_train.errors import is_terminal, one_line
from accel_train.launch.agreement import broadcast_from_main, check_shared_directory
from accel_train.launch.parent import elastic_advice
from accel_train.launch.precision import precision, precision_notice
from accel_train.ownership.lease import Lease
from accel_train.records.console import Console
from accel_train.records.cost import Ledger
from accel_train.records.directory import RunDirectory
from accel_train.records.events import Event, Noted, Said, Started, Warned
from accel_train.records.provenance import environment
from accel_train.records.sinks import MetricsLines, Sink, Status
from accel_train.records.summary import data_record, describe, model_info_of, resumed_text
from accel_train.run.finished import FinishedRun
from accel_train.run.stopping import StopRequests
from accel_train.training_setup import TrainingSetup
from accel_train.untrusted import read_json_object


def open_directory(accelerator: Accelerator, lease: Lease) -> RunDirectory:
    """The run's directory; only the main process writes it. Raises UserError."""
    path = lease.directory
    # Once for its error, which all processes must raise.
    broadcast_from_main(accelerator, lambda: bool(RunDirectory(path, writes=True)))
    directory = RunDirectory(path, writes=accelerator.is_main_process, lease=lease)
    check_shared_directory(accelerator, path)
    return directory


def create_checkpoints(setup: TrainingSetup, lease: Lease) -> Checkpoints:
    """The checkpoints of the run that `lease` owns."""
    return Checkpoints(
        lease.directory / "checkpoints",
        setup.config,
        setup.accelerator,
        setup.model,
        setup.optimizer,
        samples=len(setup.splits.train),
        ema=setup.ema and setup.ema.module,
        schedule=setup.schedule,
        lease=lease,
        table=setup.splits.table,
    )


def restore(setup: TrainingSetup, checkpoints: Checkpoints, finished: FinishedRun | None) -> tuple[TrainState, bool]:
    """The position of the run, and whether it resumes from a checkpoint. Raises UserError."""
    config, accelerator = setup.config, setup.accelerator
    broadcast_from_main(accelerator, checkpoints.check_writable)
    extended = finished is not None and config.resume == "auto"  # a finished run never starts from the beginning
    # The model does not have the weights that the run began from: only a checkpoint's will do.
    waits = setup.from_checkpoint and config.resume == "auto"
    restored = checkpoints.restore("must" if extended or waits else config.resume, config.allow_change)
    state = restored or TrainState()
    state.check_position(setup.plan.samples, checkpoints.folder)
    if finished is not None:
        broadcast_from_main(accelerator, lambda: finished.rename_results(checkpoints.lease))
        checkpoints.notes.append(finished.note)
    return state, restored is not None


def write_metadata(setup: TrainingSetup, directory: RunDirectory, update: int) -> list[str]:
    """Write the run's settings, model's input and classes, data, devices and user's code; return notes."""
    info = model_info_of(setup.config, setup.splits, setup.image_size)
    devices = gather_object([str(setup.device)])

    def write() -> list[str]:
        now = precision(setup.accelerator)
        around = environment(setup.launch.world_size, devices, now) | {"trial": asdict(setup.verdict)}
        before = read_json_object(directory.path / "environment.json").get("precision", now)
        notes = [f"the run goes on in {now} ({one_line(str(before))[:20]} before)"] if update and before != now else []
        directory.begin(setup.config, info, around, data_record(setup.splits), update)
        return notes + directory.keep_code(setup.config, update)

    return broadcast_from_main(setup.accelerator, write)


def create_console(setup: TrainingSetup, update: int, offset: int) -> Console:
    """The output of a run after `update`, which is `offset` updates longer than its plan."""
    plan = setup.plan
    return open_console(
        prints=setup.accelerator.is_main_process,
        total_updates=plan.updates + offset,
        updates_per_epoch=plan.updates_per_epoch,
        epochs=plan.updates / plan.updates_per_epoch,
        first_update=update,
        chosen=setup.config.metrics,
    )


def open_console(*, prints: bool, **values: Any) -> Console:
    """The output of a run: if this process `prints`, live on a terminal and in a notebook; else lines. `values`: see
    `Console`."""
    rich = RichConsole(highlight=False)
    is_live = is_terminal(sys.stdout) and rich.is_terminal and not rich.is_dumb_terminal
    if rich.is_jupyter:  # what notebook_launcher has forked cannot change the output of a cell
        is_live = "RANK" not in os.environ
    if not (prints and is_live):
        return Console(**values)
    from accel_train.records.terminal import LiveConsole

    return LiveConsole(rich, **values)


def create_sinks(
    setup: TrainingSetup,
    directory: RunDirectory,
    console: Console,
    ledger: Ledger,
    observers: Sequence[object],
    requests: StopRequests,
) -> list[Sink]:
    """Who is told what happens, in their order: see docs/architecture.md. Only the main process tells somebody."""
    if not directory.writes:
        return []
    sinks: list[Sink] = [MetricsLines(directory), Status(directory)]
    if setup.config.trackers:
        from accel_train.records.trackers import Trackers

        sinks.append(Trackers(setup.config, directory.path))
    sinks += [console, ledger]
    if observers:
        from accel_train.run.observers import Observers

        sinks.append(Observers(observers, requests))
    return sinks


def announcement(
    setup: TrainingSetup, state: TrainState, checkpoints: Checkpoints, ledger: Ledger, *, updates: int, resumed: bool
) -> Iterator[Event]:
    """What is to be said when training begins: what is trained, and where a `resumed` run continues.

    `updates`: of the whole run.
    """
    config, accelerator, plan, splits = setup.config, setup.accelerator, setup.plan, setup.splits
    trained = state.stopped_by(config, plan) is not None
    shown = (splits, setup.model, setup.image_size, setup.training.placement, setup.loaded)
    yield Said(tuple(describe(config, plan, accelerator, *shown)))
    if setup.loaded:
        yield Noted(f"weights: {setup.loaded}")
    for note in (*splits.notes, *checkpoints.notes):
        yield Warned(note)
    if not trained and (note := _rate_note(setup, checkpoints)):
        yield Warned(note)
    yield Started(
        update=state.update,
        updates=updates,
        epoch=state.current_epoch(config, plan),
        evaluated=state.is_evaluated,
        skipped_updates=len(state.left_out),
        resumed=resumed,
        trained=trained,
        checkpoint=checkpoints.last_saved,
        directory=checkpoints.folder.parent,
    )
    if resumed:
        yield Noted("resumed", {"update": state.update, "processes": plan.processes})
    if resumed or ledger.repeated_updates:
        yield Said((resumed_text(state, plan.processes, ledger, ended=trained),))
    for warning in (precision_notice(accelerator), elastic_advice(), *setup.warnings):
        if warning is not None:
            yield Warned(warning)


def _rate_note(setup: TrainingSetup, checkpoints: Checkpoints) -> str:
    """How settings that have changed since the checkpoint change the learning rate; "" if they do not."""
    before, rate = checkpoints.rate_before, setup.schedule.highest
    if before is None or abs(rate - before) <= 1e-3 * max(rate, before):
        return ""
    return f"the learning rate goes from {before:.3g} to {rate:.3g}, because of the changed settings"
