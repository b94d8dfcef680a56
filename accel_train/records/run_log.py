"""The log of a run: sends each figure and event to the console, metrics.jsonl, status.json and the trackers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn

from accel_train.checkpoint.manager import Checkpoints
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.schema import Config
from accel_train.data.order.plan import Plan
from accel_train.data.placement import Placement
from accel_train.data.sources.load import Splits
from accel_train.launch.precision import precision
from accel_train.optim.micro_batch import searches
from accel_train.records.console import Console
from accel_train.records.cost.summary import cost_text
from accel_train.records.directory import DAMAGED, MARKER, RunDirectory
from accel_train.records.meter import Stopwatch, Sums
from accel_train.records.metrics import Evaluation, headlines, training_metrics
from accel_train.records.summary import describe, example_image, next_steps, result_of, stopped_text
from accel_train.records.trackers.sending import Trackers


class RunLog:
    """Writes the log on the main process; on the other processes every method does nothing.

    All figures are of all processes together.
    """

    def __init__(
        self, config: Config, plan: Plan, accelerator: Accelerator, directory: RunDirectory, console: Console
    ) -> None:
        self.config, self.plan = config, plan
        self.accelerator, self.directory, self.console = accelerator, directory, console
        self._seconds, self._samples, self._waiting = 0.0, 0, 0.0  # the stopwatch's values at the last train line
        self._last_eval = time.monotonic()  # when the last eval line was written
        self._train_images = plan.samples
        self._failures = 0  # failed saves that the user has been warned of
        self._first_update = 0  # updates done before this start of the run
        self._splits: Splits | None = None
        self._multi_label = False
        self.trackers = Trackers(config, directory.path, config.trackers if directory.writes else ())

    def begin(
        self,
        state: TrainState,
        *,
        resumed: bool,
        splits: Splits,
        model: nn.Module,
        size: int,
        placement: Placement,
        loaded: str,
        notes: Sequence[str],
    ) -> None:
        """Log the start of training: what is trained, `notes` as warnings, and where a `resumed` run continues.

        `size`: height and width of the model's input, in pixels; `placement`: of the training data; `loaded`: the
        weights from which a new run begins, and which parts of them, or "".
        """
        self._splits, self._multi_label = splits, splits.multi_label
        self._seconds, self._samples = state.train_seconds, state.timed_samples
        self._first_update = state.update
        self._train_images = len(splits.to_train_on)
        self.console.say(*describe(self.config, self.plan, self.accelerator, splits, model, size, placement, loaded))
        if loaded:
            self.directory.event(f"weights: {loaded}")
        for note in notes:
            self.warn(note)
        # Also at update 0: a run that was killed before its first checkpoint has left lines.
        ended = state.stopped_by(self.config) is not None
        if damaged := self.directory.rewind(state.update, state.epoch, tests_again=ended):
            self.warn(f"metrics.jsonl: {damaged} damaged line{'s' * (damaged > 1)} moved to {DAMAGED}")
        self.trackers.begin(state.update, resumed=resumed)
        if searches(self.config, self.accelerator):
            self.directory.event(
                "micro-batch found", micro_batch=self.plan.micro_batch, accumulation=self.plan.accumulation
            )
        if resumed:
            self.directory.event("resumed", update=state.update, processes=self.plan.processes)
            place = "with all epochs trained" if ended else f"in epoch {state.epoch + 1}"
            self.console.say(f"continuing after update {state.update}, {place}")
        self.directory.status(
            "training",
            force=True,
            epoch=self._epoch(state),
            update=state.update,
            updates=self._updates,
            left_out_updates=len(state.left_out),
        )

    def _epoch(self, state: TrainState) -> int:
        """The current epoch, counted from 1; after the end of the last epoch still that one."""
        return state.epoch + (state.stopped_by(self.config) is None)

    @property
    def _updates(self) -> int:
        return self.console.total_updates

    def warn(self, text: str) -> None:
        """Print a warning, and log it as an event."""
        self.console.warn(text)
        self.directory.event(text)

    def _log(self, kind: str, **values: Any) -> None:
        self.trackers.add(self.directory.log(kind, **values))

    def end_trackers(self, result: Mapping[str, Any] | None = None) -> None:
        """End the trackers, if they are not ended. `result`: of a finished run."""
        for warning in self.trackers.end(result):
            self.warn(warning)

    def on_update(self, state: TrainState, last_checkpoint: int | None) -> None:
        """Show that an update is done: on the console, and in status.json if that is older than 2 seconds."""
        self.console.advance(state.update)
        eta = self.console.eta_seconds
        self.directory.status("training", update=state.update, eta_seconds=eta, last_checkpoint=last_checkpoint)
        self.trackers.settle(last_checkpoint)
        for warning in self.trackers.warnings():
            self.warn(warning)

    def log_updates(self, state: TrainState, sums: Sums, lr: float, watch: Stopwatch) -> None:
        """Log the updates since the last train line. `sums`: of their metrics; `lr`: of the last update."""
        seconds, samples = watch.lap() - self._seconds, watch.samples - self._samples
        waiting = watch.waiting - self._waiting
        self._seconds, self._samples, self._waiting = watch.seconds, watch.samples, watch.waiting
        if samples == 0 and watch.warm_up:  # the first update alone, which the stopwatch leaves out: no other speed yet
            seconds, samples = watch.warm_up, sums.samples
        figures: dict[str, Any] = {
            **sums.means,
            "lr": lr,
            "images_per_second": samples / max(seconds, 1e-9),
            "data_wait_fraction": min(1.0, waiting / max(seconds, 1e-9)),
        }
        epoch = self._epoch(state)
        self.console.show_training(state.update, epoch, figures)
        self._log("train", epoch=epoch, update=state.update, seconds=seconds, **figures)
        self.directory.status(
            "training", epoch=epoch, update=state.update, eta_seconds=self.console.eta_seconds, **figures
        )

    def log_epoch(self, state: TrainState) -> None:
        """Log the training metrics of the whole epoch, which were counted while the weights changed."""
        counted = {metric.name for metric in training_metrics(multi_label=self._multi_label)}
        figures = {name: value for name, value in state.epoch_metrics.items() if name in counted}
        self._log_eval("train", state, figures, state.epoch_count)

    def log_evaluation(self, name: str, state: TrainState, evaluation: Evaluation) -> None:
        """Log an evaluation. `name`: the split, such as "test", or "test (ema)" if the EMA was evaluated."""
        self._log_eval(name, state, evaluation.figures, evaluation.count)

    def _log_eval(self, name: str, state: TrainState, figures: dict[str, float], count: int) -> None:
        split, weights = name.removesuffix(" (ema)"), "ema" if name.endswith(" (ema)") else "model"
        epoch, now = self._epoch(state), time.monotonic()
        seconds, self._last_eval = now - self._last_eval, now
        self.console.show_evaluation(name, epoch, figures, seconds)
        self._log(
            "eval",
            split=split,
            weights=weights,
            epoch=epoch,
            update=state.update,
            **figures,
            count=count,
            seconds=seconds,
        )

    def log_checkpoint(self, state: TrainState, checkpoints: Checkpoints) -> None:
        """Log that a save has begun, which is written in the background, and warn of earlier saves that failed."""
        stalled = checkpoints.stalled_seconds
        seconds = checkpoints.last_seconds  # of the last complete save: of this one only if the run waited for it
        epoch = self._epoch(state)
        self._log("checkpoint", epoch=epoch, update=state.update, stalled_seconds=stalled, seconds=seconds)
        self.warn_of_failed_saves(checkpoints)
        self.directory.status("training", last_checkpoint=checkpoints.last_saved, failed_checkpoints=self._failures)

    def warn_of_failed_saves(self, checkpoints: Checkpoints) -> None:
        """Warn of each failed save once."""
        for failure in checkpoints.failures[self._failures :]:
            self.warn(failure)
        self._failures = len(checkpoints.failures)

    def log_skipped_update(self, number: int, reason: str, state: TrainState, *, action: str) -> None:
        """Log that update `number` is not finite and is skipped: at once ("skip"), or after a "rewind".

        `reason`: what is not finite.
        """
        self.console.warn(f"update {number} is not finite: {reason}; {action}")
        self.directory.event(f"not finite: {reason}", update=number, action=action)
        self.directory.status("training", force=True, left_out_updates=len(state.left_out))

    def log_rewind(self, state: TrainState) -> None:
        """Log that the run went back to its last checkpoint, whose position is `state`."""
        self.directory.rewind(state.update, state.epoch)
        self.trackers.rewind(state.update)
        self.directory.event("rewound", update=state.update)
        self.console.say(f"going back to the checkpoint of update {state.update}")
        self.console.advance(state.update)

    def log_interruption(self, state: TrainState, reason: str, checkpoints: Checkpoints, go_on: str) -> str:
        """Log that the run was asked to stop, after its last save. Returns a sentence if that has failed, else "".

        `go_on`: the command that resumes the run.
        """
        self.directory.event("interrupted", update=state.update, reason=reason)
        self.trackers.settle(checkpoints.last_saved)
        by = "Ctrl-C" if reason == "SIGINT" else reason
        stopped = f"Stopped by {by} after update {state.update} of {self._updates}"
        newest, figures, problem = checkpoints.newest(), {"run": str(self.directory.path)}, ""
        if newest is not None and checkpoints.last_saved == state.update:
            title = f"{stopped}; nothing is lost."
            if not self.directory.ask_for_requeue(state.update):
                figures["job"] = f"{MARKER} could not be written: a job script will not start the run again"
            self.directory.status("interrupted", update=state.update, force=True)
        else:
            title = f"{stopped}, but this could not be saved."
            figures = {"kept": self._kept(checkpoints)} | figures
            # Without a checkpoint of its own this start made no progress, nor would the next: do not requeue for ever.
            if newest is not None and (checkpoints.last_saved or 0) > self._first_update:
                self.directory.ask_for_requeue(checkpoints.last_saved or 0)
            problem = f"{title} Kept: {figures['kept']}."
            self.directory.status("failed", update=state.update, reason=problem, force=True)
        self.console.finish(title, figures, {"go on": go_on})
        return problem

    @contextmanager
    def last_words(self, checkpoints: Checkpoints, go_on: str) -> Iterator[None]:
        """Surround the training: a second Ctrl-C ends it at once, and this prints which checkpoint is kept."""
        try:
            yield
        except KeyboardInterrupt:
            kept = self._kept(checkpoints)
            if checkpoints.is_writing:
                kept += "; another one is still being written"
            self.console.finish(
                "Stopped without saving.", {"kept": kept, "run": str(self.directory.path)}, {"go on": go_on}
            )
            raise

    def log_unsaved_end(self, checkpoints: Checkpoints, go_on: str) -> str:
        """Log that all is trained but the last checkpoint could not be written; return this in sentences. The run
        counts as failed, not as finished. `go_on`: the command that resumes it."""
        kept = self._kept(checkpoints)
        self.directory.fail(f"the final checkpoint could not be written; kept: {kept}")
        title = "The final weights could not be saved: the run is not finished."
        self.console.finish(title, {"kept": kept, "run": str(self.directory.path)}, {"after freeing space": go_on})
        return f"{title} Kept: {kept}. After freeing space: {go_on}"

    def _kept(self, checkpoints: Checkpoints) -> str:
        if checkpoints.newest() is None:
            return "nothing, because there is no checkpoint"
        return f"the checkpoint of update {checkpoints.last_saved}, the newest complete one"

    def log_end(
        self, state: TrainState, last: dict[str, Evaluation], watch: Stopwatch, times: Mapping[str, Any]
    ) -> str:
        """Write result.json and print the final screen. `last`: the final evaluations, "test", "test (ema)", "val"…

        `times`: "wall_seconds" of the last start and "cost" of all, see `cost_of`. Returns a sentence if result.json
        could not be written, else "".
        """
        config, run = self.config, self.directory
        result = result_of(config, self.plan, self._train_images, state, last, multi_label=self._multi_label) | {
            "precision": precision(self.accelerator),
            "warm_up_seconds": watch.warm_up,  # like wall_seconds, of the last start
            **times,
        }
        problem = "" if run.result(result) else f"{run.path}/result.json could not be written: the run is not finished."
        ended = {"state": "failed", "reason": problem} if problem else {"state": "finished"}
        run.status(**ended, force=True, epoch=state.epoch, update=state.update, eta_seconds=0)
        self.end_trackers(result)
        figures = {
            f"{name} {metric}": shown
            for name, evaluation in last.items()
            for metric, shown in headlines(evaluation.figures).items()
            if metric != "loss"
        }
        if state.timed_samples:
            figures["speed"] = f"{result['images_per_second']:,.0f} images/s, {state.train_seconds:.1f} s of training"
            if watch.warm_up is not None and watch.warm_up > 1:  # compilation, say
                figures["speed"] += f" after {watch.warm_up:.1f} s of the first update"
        figures["time"] = cost_text(times["cost"])
        if state.left_out:
            figures["skipped"] = f"{len(state.left_out)} updates that were not finite"
        figures["run"] = str(run.path)
        if (stopped := stopped_text(self.config, state, multi_label=self._multi_label)) is not None:
            figures["stopped"] = stopped
            run.event(f"stopped: {stopped}", update=state.update)
        epochs = f"{state.epoch} of " * (state.epoch < config.epochs)
        epochs += f"{config.epochs} epoch{'s' * (config.epochs > 1)}"
        title = f"{config.recipe}: {epochs}, {state.update} updates"
        image = example_image(self._splits, run.path) if run.writes and self._splits else None
        self.console.finish(title, figures, next_steps(run.path, image))
        return problem
