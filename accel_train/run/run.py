"""One run around its training loop: its directory, checkpoints, records, signals and watchdog; and how its start ends.

Finished or interrupted: all that it should leave is written, or UnsavedError is raised.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from rich.console import Console as RichConsole

from accel_train.checkpoint.directory import checkpoint_path
from accel_train.checkpoint.state import TrainState
from accel_train.checkpoint.store import Checkpoints
from accel_train.data.loading import evaluation_batch_size
from accel_train.data.order import UpdateSize
from accel_train.errors import EvaluationError, UnsavedError, counted, is_terminal, one_line
from accel_train.evaluate import Batch, evaluate
from accel_train.files import read_json_object
from accel_train.launch.accelerator import precision
from accel_train.launch.agreement import broadcast_from_main, check_shared_directory
from accel_train.launch.process import MARKER, start_folder
from accel_train.launch.stopping import StopRequests
from accel_train.models.verdict import raise_unused_parameters_advice
from accel_train.models.wrapping import broadcast_buffers
from accel_train.optim.performance import evaluation_advice, memory_advice, raise_memory_advice, training_advice
from accel_train.ownership.owner import Lease
from accel_train.records.console import Console
from accel_train.records.cost import Ledger, cost_of
from accel_train.records.directory import RunDirectory, environment
from accel_train.records.events import (
    Closed,
    Ended,
    Evaluated,
    Event,
    Logged,
    MetricsLines,
    Noted,
    Said,
    SaveBegun,
    SaveCommitted,
    Sink,
    Started,
    Status,
    Stream,
    UpdateDone,
    Warned,
)
from accel_train.records.meter import Meter, Stopwatch
from accel_train.records.metrics import Evaluation
from accel_train.records.summary import (
    data_record,
    describe,
    final_metrics,
    model_info_of,
    next_steps,
    result_of,
    resume_command,
    resumed_text,
    stopped_text,
)
from accel_train.run.start import restore
from accel_train.run.watchdog import Watchdog
from accel_train.step import Guard
from accel_train.training_setup import TrainingSetup

TELL_SECONDS = 0.2
"""After that time the sinks are told of an update again. They are told of each with a line of the log, too, and of all
if there are observers."""


@dataclass(frozen=True)
class Due:
    """What is due after an update; the same on all processes.

    At an epoch's end neither `evaluate` nor `save`: the loop does both there by itself, and may save later.
    """

    stop: bool
    evaluate: bool
    save: bool
    log: bool
    """Whether a line of the log is due. It comes before each of the others."""


class Run:
    """Opens the run of a setup, at its beginning or at its newest checkpoint; `watched` surrounds its training.

    Collective: all processes create it and make the same calls.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        lease: Lease,
        requests: StopRequests,
        began: float,
        observers: Sequence[object] = (),
    ) -> None:
        """`began`: when this start began, by time.monotonic(). `observers`: see observers.py.
        Raises UserError if the directory or its checkpoints cannot be used."""
        self.setup, self.config, self.accelerator = setup, setup.config, setup.accelerator
        self.stop_requests, self.began = requests, began
        self.is_main = self.accelerator.is_main_process
        path = lease.directory
        # Once for its error, which all processes must raise.
        broadcast_from_main(self.accelerator, lambda: bool(RunDirectory(path, writes=True)))
        self.directory = RunDirectory(path, writes=self.is_main, lease=lease)
        check_shared_directory(self.accelerator, path)
        self.checkpoints = Checkpoints(
            self.config,
            self.accelerator,
            setup.model,
            setup.optimizer,
            lease,
            samples=len(setup.splits.train),
            ema=None if setup.ema is None else setup.ema.module,
            schedule=setup.schedule,
            table=setup.splits.table,
        )
        self.state, self.resumed = restore(setup, self.checkpoints)
        self.ledger = Ledger(
            self.directory,
            launch=setup.launch,
            on_cpu=setup.device.type == "cpu",
            update=self.state.update,
        )
        self._first_began = began - self.state.wall_seconds  # as if all starts had followed each other at once
        # Updates done beyond those of a run that had these settings from its start (after a change of the batch size,
        # say). They are subtracted so that the schedule's epochs are epochs of the data.
        self.schedule_offset = self.state.update - setup.plan.updates_until(self.state.epoch, self.state.epoch_samples)
        setup.schedule.step_update(self.state.update - self.schedule_offset)
        self.checkpoints.notes += _write_metadata(setup, self.directory, self.state.update)
        self.meter = Meter(self.accelerator, setup.splits.task)
        self.stopwatch = Stopwatch(self.state.train_seconds, self.state.timed_samples)
        self.evaluations: dict[str, Evaluation] = {}
        """The newest of each split: "val", "test", and with the EMA's weights "test (ema)"."""
        self._warned_of_nan = False
        self.save_is_due = False
        """A signal, a file, the clock or --checkpoint.every-updates requests a save that is not done yet."""
        self.resume_command = resume_command(setup.launch, path)
        config = self.config
        hang_seconds = config.hang_timeout_seconds
        self.watchdog = Watchdog(self.accelerator, self.directory, requests, hang_seconds, setup.launch.agent)
        plan = setup.plan
        self.console = open_console(
            prints=self.is_main,
            total_updates=plan.updates + self.schedule_offset,
            updates_per_epoch=plan.updates_per_epoch,
            epochs=plan.updates / plan.updates_per_epoch,
            first_update=self.state.update,
            metrics=setup.splits.task.evaluation_metrics(config.metrics),
        )
        self.pace = self.console.pace
        self._last_eval = time.monotonic()  # the end of the last evaluation
        self._tell_seconds = 0.0 if observers else TELL_SECONDS
        self._told = -math.inf  # when the sinks were told of an update for the last time
        self._failures = 0  # failed saves that the user has been warned of
        self.sinks = create_sinks(setup, self.directory, self.console, self.ledger, observers, requests)
        self.emit = Stream(self.sinks).emit
        self.guard = Guard(config, self.accelerator, setup.model, self.emit, self._has_no_checkpoint)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround the training: watched, shown, and at its end nothing is left to be written."""
        with ExitStack() as around:
            around.callback(self.checkpoints.wait)  # before the ownership is released
            around.enter_context(self.watchdog)
            around.enter_context(self.console)
            around.callback(lambda: self.emit(Closed()))
            around.enter_context(self._report_interrupt())
            self._begin()
            try:
                yield
            except Exception as error:  # of the device, of DDP or of a restored optimizer: say what to do instead
                raise_memory_advice(error, training_advice(self.setup.plan))
                raise_unused_parameters_advice(error)
                self.checkpoints.raise_state_advice(error, self.state.update)
                raise

    def _begin(self) -> None:
        setup, config, state = self.setup, self.config, self.state
        self.stop_requests.begin(
            self.directory.path if self.is_main else None,
            config.checkpoint.every_seconds,
            config.rendezvous_timeout_seconds,
        )
        updates, resumed = self.pace.total_updates, self.resumed
        for event in _announcement(setup, state, self.checkpoints, self.ledger, updates=updates, resumed=resumed):
            self.emit(event)
        if state.stopped_by(config, setup.plan) and self._has_no_checkpoint():
            # Trained to the end in another run: the weights to publish come from a checkpoint of this one.
            self.save(wait=True)

    @contextmanager
    def _report_interrupt(self) -> Iterator[None]:
        """Surround the training: a second Ctrl-C ends it at once, and this says which checkpoint is kept."""
        try:
            yield
        except KeyboardInterrupt:
            kept = self.checkpoints.kept + "; another one is still being written" * self.checkpoints.is_writing
            shown = {"kept": kept, "run": str(self.directory.path)}
            commands = {"go on": self.resume_command}
            self.emit(Ended(self.state.update, "failed", "Stopped without saving.", shown, commands))
            raise

    def _has_no_checkpoint(self) -> bool:
        def look() -> bool:
            self.checkpoints.wait()
            return self.checkpoints.last_saved is None

        return broadcast_from_main(self.accelerator, look)

    def batches(self) -> Iterator[Batch]:
        """The training's micro-batches; the time of waiting for them is measured, and the watchdog monitors it."""
        return self.stopwatch.timed(self.watchdog.monitored(self.setup.training.batches, "training"))

    def count_update(self, size: UpdateSize, *, applied: bool) -> None:
        """Count an update whose optimizer step was `applied` or skipped."""
        state = self.state
        state.update += 1
        state.epoch_samples += size.covered
        if applied:
            self.meter.commit()
            state.samples_seen += size.samples
            state.epoch_left_out += size.covered - size.samples
        else:
            self.meter.discard()
            state.epoch_left_out += size.covered
        self.stopwatch.trained(size.samples)
        self.pace.update = state.update
        self.watchdog.advance(state.update)

    def due(self, *, ends_epoch: bool) -> Due:
        """What the user, a signal, the clock and the recipe have made due after this update. Collective."""
        state, config = self.state, self.config
        stop, save = self.stop_requests.poll()
        every = config.checkpoint.every_updates
        self.save_is_due = save or (every is not None and state.update % every == 0)
        evaluates = config.eval_every_updates is not None and state.update % config.eval_every_updates == 0
        log = stop or self.save_is_due or evaluates or ends_epoch or state.update % config.log_every_updates == 0
        now = time.monotonic()
        if log or now - self._told >= self._tell_seconds:
            self._told = now
            self.emit(UpdateDone(state.update, state.epoch + 1, self.pace.eta_seconds, log))
        if self.checkpoints.committed or len(self.checkpoints.failures) > self._failures:
            self.report_saves()
        return Due(stop, evaluates and not ends_epoch, self.save_is_due and not ends_epoch, log)

    def log_update(self) -> None:
        """Log the training metrics since the last line. Collective."""
        state = self.state
        sums = self.meter.reduce()
        state.add_metrics(sums.totals, sums.samples)
        seconds, speed = self.stopwatch.speed(sums)
        values = {**sums.means, "lr": self.setup.schedule.last_lr, **speed}
        self.emit(Logged(state.update, self._epoch, seconds, values, self.pace.eta_seconds))

    def log_epoch(self) -> None:
        """Say the training metrics of the whole epoch, which were counted while the weights changed."""
        counted = {metric.name for metric in self.setup.splits.task.training_metrics}
        metrics = {name: value for name, value in self.state.epoch_metrics.items() if name in counted}
        self._log_evaluation("train", metrics, self.state.epoch_count)

    def _log_evaluation(self, name: str, metrics: dict[str, float], count: int) -> None:
        now = time.monotonic()
        seconds, self._last_eval = now - self._last_eval, now
        self.emit(Evaluated(name, self.state.update, self._epoch, metrics, count, seconds))

    @property
    def _epoch(self) -> int:
        return self.state.current_epoch(self.config, self.setup.plan)

    def count_time(self) -> None:
        """Count at an epoch's end how long the run has lasted: the same on all processes, which may end by it."""
        self.state.wall_seconds = broadcast_from_main(self.accelerator, lambda: time.monotonic() - self._first_began)

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint in the background, or `wait` until it is on the disk."""
        self.watchdog.heartbeat("saves a checkpoint")
        self.state.train_seconds, self.state.timed_samples = self.stopwatch.lap(), self.stopwatch.samples
        if self.state.epoch_samples:  # at an epoch's end it is counted already
            self.state.wall_seconds = time.monotonic() - self._first_began
        with self.ledger.during("saving"):
            self.checkpoints.save(self.state, wait=wait)
        self.stop_requests.saved()
        stalled, seconds = self.checkpoints.stalled_seconds, self.checkpoints.last_seconds
        failures = len(self.checkpoints.failures)
        self.emit(SaveBegun(self.state.update, self._epoch, stalled, seconds, failures))
        self.report_saves()

    def report_saves(self) -> None:
        """Say which saves are complete on the disk or have failed, each once."""
        while self.checkpoints.committed:
            update = self.checkpoints.committed.popleft()
            self.emit(SaveCommitted(update, checkpoint_path(self.checkpoints.folder, update)))
        failures = self.checkpoints.failures[self._failures :]
        self._failures += len(failures)
        for failure in failures:
            self.emit(Warned(failure))

    def evaluate(self, split: str) -> Evaluation:
        """Evaluate the model, and the EMA if there is one; return the EMA's result, else the model's. Raises
        StopAskedError."""
        ema = self.setup.ema
        names = {split: self.setup.model} | ({} if ema is None else {f"{split} (ema)": ema.module})

        samples = self.setup.evaluations[split].samples
        batch = evaluation_batch_size(self.setup.config, samples, self.setup.evaluation_batch)

        def through(batches: Iterator[Batch]) -> Iterator[Batch]:
            watched = self.watchdog.monitored(batches, f"evaluating {split}")
            return self.stop_requests.interruptible(watched)

        for name, model in names.items():
            broadcast_buffers(model)
            try:
                with memory_advice(evaluation_advice(batch)), self.ledger.during("evaluating"):
                    self.evaluations[name] = evaluate(
                        self.accelerator, model, self.setup.evaluations[split], through, own=self.setup.own_metrics
                    )
            except EvaluationError as error:  # raised by all processes: what was trained is not lost by it
                self.save(wait=True)
                newest = broadcast_from_main(self.accelerator, lambda: self.checkpoints.last_saved)
                saved = f"Saved: update {newest} of {self.state.update}; correct this, then: {self.resume_command}"
                raise EvaluationError(*error.messages, saved) from error
            self._log_evaluation(name, self.evaluations[name].metrics, self.evaluations[name].count)
            warning = self.evaluations[name].warning(name)
            if warning is not None and not self._warned_of_nan:  # once: the next epochs will hardly be better
                self.emit(Warned(warning))
            self._warned_of_nan |= warning is not None
        return self.evaluations[name]


def _write_metadata(setup: TrainingSetup, directory: RunDirectory, update: int) -> list[str]:
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


def open_console(*, prints: bool, **values: Any) -> Console:
    """The output of a run: if this process `prints`, live on a terminal; else lines. `values`: see `Console`."""
    rich = RichConsole(highlight=False)
    is_live = is_terminal(sys.stdout) and rich.is_terminal and not rich.is_dumb_terminal
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


def _announcement(
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
    yield Started(
        update=state.update,
        updates=updates,
        epoch=state.current_epoch(config, plan),
        epochs=config.epochs,
        evaluated=state.is_evaluated,
        skipped_updates=state.skipped_updates,
        resumed=resumed,
        trained=trained,
        checkpoint=checkpoints.last_saved,
        directory=checkpoints.folder.parent,
    )
    if resumed:
        yield Noted("resumed", {"update": state.update, "processes": plan.processes})
    if resumed or ledger.repeated_updates:
        yield Said((resumed_text(state, ledger, ended=trained),))
    for warning in setup.warnings:
        yield Warned(warning)


@dataclass(frozen=True)
class TrainingResult(os.PathLike[str]):
    """How a training has ended: the same on all processes. It is also the path of the run's directory."""

    directory: Path
    finished: bool
    """False if it was asked to stop: the same call continues it."""
    stopped_by: str | None
    """Of a finished run "epochs", "updates", "patience" or "hours"; else what asked: "SIGUSR1", or "the file STOP"."""
    metrics: Mapping[str, Any] = field(repr=False)
    """Those of result.json; of a run that is not finished only its "epochs" and "updates"."""
    failed_writes: int = 0
    """Checkpoints and records that could not be written on the way; the console has warned of them."""
    nothing_left: bool = False
    """The run was finished before, and nothing was trained."""
    objects: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The objects of the program that were trained with: option ("model.name") -> object. Pickled, it has none."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "objects": {}}

    def __fspath__(self) -> str:
        return str(self.directory)


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
    if stopped := stopped_text(config, result["stopped_by"]):
        run.emit(Noted(f"stopped: {stopped}", {"update": state.update}))
    epochs = f"{result['epochs']:g} of " * (result["stopped_by"] != "epochs") + counted(config.epochs, "epoch")
    run.emit(
        Ended(
            state.update,
            "failed" if problem else "finished",
            f"{config.recipe}: {epochs}, {counted(state.update, 'update')}",
            final_metrics(result, state, last, stopped, folder, task.evaluation_metrics(config.metrics)),
            next_steps(folder),
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
