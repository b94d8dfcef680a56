"""One run around its training loop: its directory, checkpoints, records, signals and watchdog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Literal

from accelerate.utils import gather_object

from accel_train.checkpoint.manager import Checkpoints
from accel_train.checkpoint.train_state import TrainState
from accel_train.evaluate import Batch, evaluate
from accel_train.launch.agreement import broadcast_from_main, check_shared_directory
from accel_train.launch.precision import precision, precision_notice
from accel_train.optim.ema import broadcast_buffers
from accel_train.optim.micro_batch import evaluation_advice, memory_advice
from accel_train.ownership.lease import Lease
from accel_train.records.console import Console
from accel_train.records.cost.ledger import Ledger
from accel_train.records.cost.usage import Usage, sum_of
from accel_train.records.directory import RunDirectory
from accel_train.records.meter import Meter, Stopwatch
from accel_train.records.metrics import Evaluation
from accel_train.records.run_log import RunLog
from accel_train.records.summary import model_info_of
from accel_train.run.finished import FinishedRun
from accel_train.run.nonfinite import Guard
from accel_train.run.relaunch import resume_command
from accel_train.run.stopping import StopRequests
from accel_train.run.watchdog import Watchdog
from accel_train.training_setup import TrainingSetup

Next = Literal["go on", "save", "stop", "rewind"]
"""What the training loop has to do after an update."""


class Run:
    """Opens the run of a setup, at its beginning or at its newest checkpoint; a context manager around its training.

    Collective: all processes create it and make the same calls.
    """

    def __init__(
        self, setup: TrainingSetup, lease: Lease, finished: FinishedRun | None, requests: StopRequests, began: float
    ) -> None:
        """`finished`: the finished run that goes on, if it is one. `began`: when this start began, by
        time.monotonic(). Raises UserError if the directory or its checkpoints cannot be used."""
        self.setup, self.config, self.accelerator = setup, setup.config, setup.accelerator
        self.stop_requests, self.began = requests, began
        self.is_main = self.accelerator.is_main_process
        self.directory = self._open_directory(lease)
        self.checkpoints = Checkpoints(
            lease.directory / "checkpoints",
            self.config,
            self.accelerator,
            setup.model,
            setup.optimizer,
            samples=setup.plan.samples,
            ema=setup.ema and setup.ema.module,
            schedule=setup.schedule,
            lease=lease,
            pixels=setup.splits.semantics,
            table=setup.splits.table,
        )
        self.state, self.resumed = self._restore(finished)
        self.ledger = Ledger(
            self.directory,
            launch=setup.launch,
            on_cpu=setup.device.type == "cpu",
            update=self.state.update,
            anew=self.config.resume == "never",
        )
        self.usage = Usage(setup.device)
        self._first_began = began - self.state.wall_seconds  # as if all starts had followed each other at once
        # Updates done beyond those of a run that had these settings from its start (after a change of the batch size,
        # say). They are subtracted so that the schedule's epochs are epochs of the data.
        self.extra_updates = self.state.update - setup.plan.updates_until(self.state.epoch, self.state.epoch_samples)
        setup.schedule.step_update(self.state.update - self.extra_updates)
        self._describe()
        self.meter = Meter(self.accelerator, multi_label=setup.splits.multi_label)
        self.stopwatch = Stopwatch(self.state.train_seconds, self.state.timed_samples)
        self.evaluations: dict[str, Evaluation] = {}
        """The newest of each split: "val", "test", and with the EMA's weights "test (ema)"."""
        self._warned_of_nan = False
        self.save_is_due = False
        """A signal, a file, the clock or --checkpoint.every-updates requests a save that is not done yet."""
        self.resume_command = resume_command(setup.launch, lease.directory)
        config = self.config
        seconds = config.start_timeout_seconds, config.hang_timeout_seconds
        self.watchdog = Watchdog(self.accelerator, self.directory, requests, *seconds, setup.launch.agent)
        self.console = Console(
            prints=self.is_main,
            total_updates=config.epochs * setup.plan.updates_per_epoch + self.extra_updates,
            updates_per_epoch=setup.plan.updates_per_epoch,
            epochs=config.epochs,
            first_update=self.state.update,
        )
        self.log = RunLog(config, setup.plan, self.accelerator, self.directory, self.console)
        self.guard = Guard(config, self.accelerator, setup.model, setup.training.transform, self.log)

    def _open_directory(self, lease: Lease) -> RunDirectory:
        path = lease.directory
        # Once for its error, which all processes must raise.
        broadcast_from_main(self.accelerator, lambda: bool(RunDirectory(path, writes=True)))
        directory = RunDirectory(path, writes=self.is_main, lease=lease)
        check_shared_directory(self.accelerator, path)
        return directory

    def _restore(self, finished: FinishedRun | None) -> tuple[TrainState, bool]:
        """The position of the run, and whether it resumes from a checkpoint. Raises UserError."""
        checkpoints, config = self.checkpoints, self.config
        broadcast_from_main(self.accelerator, checkpoints.check_writable)
        extended = finished is not None and config.resume == "auto"  # a finished run never starts from the beginning
        # The model does not have the weights that the run began from: only a checkpoint's will do.
        waits = self.setup.from_checkpoint and config.resume == "auto"
        restored = checkpoints.restore("must" if extended or waits else config.resume, config.allow_change)
        state = restored or TrainState()
        state.check_position(self.setup.plan.samples, checkpoints.folder)
        if finished is not None:
            broadcast_from_main(self.accelerator, lambda: finished.rename_results(self.directory.lease))
            checkpoints.notes.append(finished.note)
        return state, restored is not None

    def _describe(self) -> None:
        """Write the run's settings, its model's input and classes, and its devices."""
        setup = self.setup
        self.directory.begin(
            self.config,
            model_info_of(self.config, setup.splits, setup.image_size),
            world_size=setup.launch.world_size,
            devices=gather_object([str(setup.device)]),
            precision=precision(self.accelerator),
            update=self.state.update,
        )
        self.checkpoints.notes += broadcast_from_main(
            self.accelerator, lambda: self.directory.keep_code(self.config, self.state.update)
        )

    def __enter__(self) -> Run:
        with ExitStack() as around:
            around.callback(self.checkpoints.wait)  # before the ownership is released
            around.enter_context(self.watchdog)
            around.enter_context(self.console)
            around.callback(self.log.end_trackers)
            around.enter_context(self.log.last_words(self.checkpoints, self.resume_command))
            self._begin()
            self._around = around.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._around.__exit__(kind, error, trace)

    def _begin(self) -> None:
        setup, config, state = self.setup, self.config, self.state
        self.stop_requests.begin(
            self.directory.path if self.is_main else None,
            config.checkpoint.every_seconds,
            config.rendezvous_timeout_seconds,
        )
        self.log.begin(
            state,
            resumed=self.resumed,
            splits=setup.splits,
            model=setup.model,
            size=setup.image_size,
            placement=setup.training.placement,
            loaded=setup.loaded,
            notes=[*setup.splits.notes, *self.checkpoints.notes],
        )
        for warning in (precision_notice(self.accelerator), *setup.warnings):
            if warning is not None:
                self.log.warn(warning)
        if config.on_nonfinite == "rewind" and self._has_no_checkpoint():
            self.save()  # so that there is a checkpoint to go back to
        if state.stopped_by(config) and self._has_no_checkpoint():
            # Trained to the end in another run: the weights to publish come from a checkpoint of this one.
            self.save(wait=True)

    def _has_no_checkpoint(self) -> bool:
        return broadcast_from_main(self.accelerator, lambda: self.checkpoints.last_saved is None)

    def batches(self) -> Iterator[Batch]:
        """The training's micro-batches; the time of waiting for them is measured, and the watchdog monitors it."""
        return self.stopwatch.timed(self.watchdog.monitored(self.setup.training.batches, "training"))

    def end_update(self, *, applied: bool, window: int, samples: int, lr: float) -> Next:
        """Count an update whose optimizer step was `applied` or skipped, and log it if a line is due.

        `window`: samples of the epoch that the update covers, of which `samples` could be read; `lr`: of its step.
        Returns what the loop has to do now. At the end of an epoch that is never "save": it saves after the evaluation.
        """
        state, config, plan = self.state, self.config, self.setup.plan
        state.update += 1
        state.epoch_samples += window
        if applied:
            self.meter.commit()
            state.samples_seen += samples
            state.epoch_left_out += window - samples
        else:
            self.meter.discard()
            state.epoch_left_out += window
        self.stopwatch.trained(samples)
        self.ledger.updated(state.update, self.stopwatch.waiting)
        self.usage.look()
        self.log.on_update(state, self.checkpoints.last_saved)
        self.watchdog.advance(state.update)
        stop, save = self.stop_requests.poll()
        every = config.checkpoint.every_updates
        self.save_is_due = save or (every is not None and state.update % every == 0)
        ends_epoch = plan.updates_from(state.epoch_samples) == 0
        due = stop or self.save_is_due or ends_epoch or state.update % config.log_every_updates == 0
        if self.guard.rewinds(state, due=due):
            return "rewind"
        if due:
            sums = self.meter.reduce()
            state.add_metrics(sums.totals, sums.samples)
            self.log.log_updates(state, sums, lr, self.stopwatch)
        if stop:
            return "stop"
        return "save" if self.save_is_due and not ends_epoch else "go on"

    def count_time(self) -> None:
        """Count at an epoch's end how long the run has lasted: the same on all processes, which may end by it."""
        self.ledger.start.usage = sum_of(gather_object([self.usage.used()]))
        self.state.wall_seconds = broadcast_from_main(self.accelerator, lambda: time.monotonic() - self._first_began)

    def save(self, *, wait: bool = False) -> None:
        """Save a checkpoint in the background, or `wait` until it is on the disk."""
        self.watchdog.heartbeat("saves a checkpoint")
        self.state.train_seconds, self.state.timed_samples = self.stopwatch.lap(), self.stopwatch.samples
        if self.state.epoch_samples:  # at an epoch's end it is counted already
            self.state.wall_seconds = time.monotonic() - self._first_began
        self.ledger.saved(self.state.update)
        with self.ledger.during("saving"):
            self.checkpoints.save(self.state, wait=wait)
        self.stop_requests.saved()
        self.log.log_checkpoint(self.state, self.checkpoints)

    def rewind(self) -> None:
        """Go back to the last checkpoint. The updates that were not finite are skipped when they are repeated."""
        self.setup.training.loader.end()  # the loop has left it in its middle
        self.stopwatch.stop()
        self.checkpoints.wait()
        self.ledger.enter("starting")
        position = self.checkpoints.restore("must", self.config.allow_change) or TrainState()
        position.left_out = self.state.left_out
        if self.setup.graphs is not None:
            self.setup.graphs.reset()
        self.setup.schedule.step_update(position.update - self.extra_updates)
        self.meter.reduce()  # those since the last log line are trained again
        self.guard.reset()
        self.ledger.rewound(position.update)
        self.log.log_rewind(position)
        self.state = position

    def evaluate(self, split: str) -> Evaluation:
        """Evaluate the model, and the EMA if there is one; return the EMA's result, else the model's. Raises
        StopAskedError."""
        ema = self.setup.ema
        names = {split: self.setup.model} | ({} if ema is None else {f"{split} (ema)": ema.module})

        def through(batches: Iterator[Batch]) -> Iterator[Batch]:
            watched = self.watchdog.monitored(batches, f"evaluating {split}")
            return self.stop_requests.interruptible(self.ledger.ticking(watched))

        for name, model in names.items():
            broadcast_buffers(model)
            with memory_advice(evaluation_advice(self.setup.evaluation_batch)), self.ledger.during("evaluating"):
                self.evaluations[name] = evaluate(self.accelerator, model, self.setup.evaluations[split], through)
            self.log.log_evaluation(name, self.state, self.evaluations[name])
            warning = self.evaluations[name].warning(name)
            if warning is not None and not self._warned_of_nan:  # once: the next epochs will hardly be better
                self.log.warn(warning)
            self._warned_of_nan |= warning is not None
        return self.evaluations[name]
