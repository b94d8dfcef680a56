"""What a run tells while it goes on: each figure to the console, metrics.jsonl, status.json and the trackers alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from accel_train.launch.accelerator import precision
from accel_train.records.console import Console
from accel_train.records.directory import DAMAGED, MARKER, RunDirectory
from accel_train.records.meter import Count, Stopwatch
from accel_train.records.metrics import Evaluation
from accel_train.records.summary import describe, example_image, next_steps, result_of
from accel_train.records.trackers import track


class Report:
    """Speaks for all processes of the run, on the main one; on the others all of it does nothing."""

    def __init__(
        self, config: Config, plan: Plan, accelerator: Accelerator, run: RunDirectory, console: Console
    ) -> None:
        self.config, self.plan = config, plan
        self.accelerator, self.run, self.console = accelerator, run, console
        self._seconds, self._samples, self._waiting = 0.0, 0, 0.0  # on the stopwatch, at the last line
        self._last = time.monotonic()  # when the last epoch's or evaluation's line was written
        self._train_images = plan.samples
        self._failures = 0  # of checkpoints, made known so far
        self._first_update = 0  # updates done by earlier starts of this run
        self._splits: Splits | None = None

    def begin(
        self,
        state: TrainState,
        *,
        resumed: bool,
        splits: Splits,
        model: nn.Module,
        size: int,
        placement: Placement,
        notes: Sequence[str],
    ) -> None:
        self._splits = splits
        self._seconds, self._samples = state.train_seconds, state.timed_samples
        self._first_update = state.update
        self._train_images = len(splits.to_train_on)
        self.console.say(describe(self.config, self.plan, self.accelerator, splits, model, size, placement))
        for note in notes:
            self.warn(note)
        # A run that was killed before its first checkpoint has lines, too.
        if damaged := self.run.rewind(state.update, state.epoch, tests_again=state.epoch >= self.config.epochs):
            self.warn(f"metrics.jsonl had {damaged} damaged line{'s' * (damaged > 1)}, moved to {DAMAGED}")
        if resumed:
            self.run.event("resumed", update=state.update, processes=self.plan.processes)
            place = f"in epoch {state.epoch + 1}" if state.epoch < self.config.epochs else "with all epochs trained"
            self.console.say(f"going on after update {state.update}, {place}")
        self.run.status(
            "training",
            force=True,
            epoch=self._epoch(state),
            update=state.update,
            updates=self._updates,
            left_out_updates=len(state.left_out),
        )

    def _epoch(self, state: TrainState) -> int:
        """The epoch under way, from 1: the last one also after its end, for the final test and checkpoint."""
        return min(state.epoch + 1, self.config.epochs)

    @property
    def _updates(self) -> int:
        return self.console.total_updates

    def warn(self, text: str) -> None:
        self.console.warn(text)
        self.run.event(text)

    def advanced(self, state: TrainState, last_checkpoint: int | None) -> None:
        """An update is done. The console shows it by itself, status.json is renewed if it is old enough."""
        self.console.advance(state.update)
        eta = self.console.eta_seconds
        self.run.status("training", update=state.update, eta_seconds=eta, last_checkpoint=last_checkpoint)

    def trained(self, state: TrainState, count: Count, lr: float, watch: Stopwatch) -> None:
        """The line of the updates since the last one: `count` is of all processes; `lr` that of the last update."""
        seconds, samples = watch.lap() - self._seconds, watch.samples - self._samples
        waiting = watch.waiting - self._waiting
        self._seconds, self._samples, self._waiting = watch.seconds, watch.samples, watch.waiting
        if samples == 0 and watch.warm_up:  # a line of the first update alone: there is no other rate yet
            seconds, samples = watch.warm_up, count.samples
        figures: dict[str, Any] = {
            "loss": count.loss,
            "accuracy": count.accuracy,
            "lr": lr,
            "images_per_second": samples / max(seconds, 1e-9),
            "data_wait_fraction": min(1.0, waiting / max(seconds, 1e-9)),
        }
        epoch = self._epoch(state)
        self.console.train(state.update, epoch, **figures)
        self.run.log("train", epoch=epoch, update=state.update, seconds=seconds, **figures)
        self.run.status("training", epoch=epoch, update=state.update, eta_seconds=self.console.eta_seconds, **figures)
        track(self.accelerator, "train", figures, state.update)

    def trained_epoch(self, state: TrainState) -> None:
        """The epoch's own figures, counted while the weights changed, over every sample of it."""
        count = Count(state.epoch_loss_sum, state.epoch_correct, state.epoch_count)
        self._evaluated("train", state, {"loss": count.loss, "accuracy": count.accuracy}, count.samples)

    def evaluated(self, name: str, state: TrainState, found: Evaluation) -> None:
        """`name`: of the split; "test (ema)" of the running mean of the weights."""
        figures = {"loss": found.loss, "accuracy": found.accuracy, "top5_accuracy": found.top5_accuracy}
        self._evaluated(name, state, figures, found.count)

    def _evaluated(self, name: str, state: TrainState, figures: dict[str, float], count: int) -> None:
        split, weights = name.removesuffix(" (ema)"), "ema" if name.endswith(" (ema)") else "model"
        epoch, now = self._epoch(state), time.monotonic()
        seconds, self._last = now - self._last, now
        self.console.evaluated(name, epoch, loss=figures["loss"], accuracy=figures["accuracy"], seconds=seconds)
        self.run.log(
            "eval",
            split=split,
            weights=weights,
            epoch=epoch,
            update=state.update,
            **figures,
            count=count,
            seconds=seconds,
        )
        track(self.accelerator, name, figures, state.update)

    def saved(self, state: TrainState, checkpoints: Checkpoints) -> None:
        """A save was begun (it is written in the background); failures of the last ones come to light here."""
        stalled = checkpoints.stalled_seconds
        seconds = checkpoints.last_seconds  # of the last save that is complete: of this one, if it was waited for
        epoch = self._epoch(state)
        self.run.log("checkpoint", epoch=epoch, update=state.update, stalled_seconds=stalled, seconds=seconds)
        self.failed(checkpoints)
        self.run.status("training", last_checkpoint=checkpoints.last_saved, failed_checkpoints=self._failures)

    def failed(self, checkpoints: Checkpoints) -> None:
        """Make the failures of saves known that came up since the last time."""
        for failure in checkpoints.failures[self._failures :]:
            self.warn(failure)
        self._failures = len(checkpoints.failures)

    def left_out(self, number: int, found: str, state: TrainState, *, action: str) -> None:
        """Update `number` was not finite and is left out: at once (skip), or when it comes again (rewind)."""
        self.console.warn(f"update {number} is not finite: {found}; {action}")
        self.run.event(f"not finite: {found}", update=number, action=action)
        self.run.status("training", force=True, left_out_updates=len(state.left_out))

    def rewound(self, state: TrainState) -> None:
        """The run goes on from its last checkpoint, whose position is `state`."""
        self.run.rewind(state.update, state.epoch)
        self.run.event("rewound", update=state.update)
        self.console.say(f"going back to the checkpoint of update {state.update}")
        self.console.advance(state.update)

    def interrupted(self, state: TrainState, reason: str, checkpoints: Checkpoints, go_on: str) -> int:
        """The run was asked to stop, and the last save has come to its end. `go_on`: the command for that.

        Returns the exit code: 1 if the save came to nothing, or anything else that was to be written.
        """
        self.run.event("interrupted", update=state.update, reason=reason)
        by = "Ctrl-C" if reason == "SIGINT" else reason
        stopped = f"Stopped by {by} after update {state.update} of {self._updates}"
        newest, figures = checkpoints.newest(), {"run": str(self.run.path)}
        if newest is not None and checkpoints.last_saved == state.update:
            title = f"{stopped}; nothing is lost."
            if not self.run.ask_for_requeue(state.update):
                figures["job"] = f"{MARKER} could not be written: a job script will not start the run again"
            self.run.status("interrupted", update=state.update, force=True)
        else:
            title = f"{stopped}, but this could not be saved."
            figures = {"kept": self._kept(checkpoints)} | figures
            # Without any progress the next start would fare no better, and the one after it, for ever.
            if newest is not None and (checkpoints.last_saved or 0) > self._first_update:
                self.run.ask_for_requeue(checkpoints.last_saved or 0)
            reason = f"{title} Kept: {figures['kept']}."
            self.run.status("failed", update=state.update, reason=reason, force=True)
        self.console.finish(title, figures, {"go on": go_on})
        return 1 if checkpoints.failures or self.run.failures else 0

    @contextmanager
    def last_words(self, checkpoints: Checkpoints, go_on: str) -> Iterator[None]:
        """Around the training: a second Ctrl-C ends it at once, and this tells what is left."""
        try:
            yield
        except KeyboardInterrupt:
            kept = self._kept(checkpoints)
            if checkpoints.is_writing:
                kept += "; another one is still being written"
            self.console.finish("Stopped without saving.", {"kept": kept, "run": str(self.run.path)}, {"go on": go_on})
            raise

    def unsaved(self, checkpoints: Checkpoints, go_on: str) -> int:
        """All is trained, but the last checkpoint is not on the disk: the run is not finished. The exit code."""
        kept = self._kept(checkpoints)
        self.run.fail(f"the final checkpoint could not be written; kept: {kept}")
        title = "The final weights could not be saved: the run is not finished."
        self.console.finish(title, {"kept": kept, "run": str(self.run.path)}, {"once there is room": go_on})
        return 1

    def _kept(self, checkpoints: Checkpoints) -> str:
        if checkpoints.newest() is None:
            return "nothing, for there is no checkpoint"
        return f"the checkpoint of update {checkpoints.last_saved}, the newest whole one"

    def finished(self, state: TrainState, last: dict[str, Evaluation], watch: Stopwatch, wall_seconds: float) -> None:
        """result.json and the last screen. `last` has the final evaluations: "test", "test (ema)", "val", …"""
        config, run = self.config, self.run
        result = result_of(config, self.plan, self._train_images, state, last) | {
            "precision": precision(self.accelerator),
            "warm_up_seconds": watch.warm_up,  # of the last start, as is the next
            "wall_seconds": wall_seconds,
        }
        run.result(result)
        run.status("finished", force=True, epoch=config.epochs, update=state.update, eta_seconds=0)
        figures = {f"{name} accuracy": f"{found.accuracy:.2%}" for name, found in last.items()}
        if state.timed_samples:
            figures["speed"] = f"{result['images_per_second']:,.0f} images/s, {state.train_seconds:.1f} s of training"
            if watch.warm_up is not None and watch.warm_up > 1:  # compilation, say
                figures["speed"] += f" after {watch.warm_up:.1f} s of the first update"
        if state.left_out:
            figures["left out"] = f"{len(state.left_out)} updates that were not finite"
        figures["run"] = str(run.path)
        title = f"{config.recipe}: {config.epochs} epoch{'s' * (config.epochs > 1)}, {state.update} updates"
        image = example_image(self._splits, run.path) if run.writes and self._splits else None
        self.console.finish(title, figures, next_steps(run.path, image))
