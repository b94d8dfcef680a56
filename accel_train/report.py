"""What a run tells: each figure goes to the console, metrics.jsonl, status.json and the trackers alike."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from accel_train.checkpoint import Checkpoints, TrainState
from accel_train.config import Config, to_yaml
from accel_train.console import Console
from accel_train.data.order import Plan
from accel_train.data.sources import Splits, load_splits
from accel_train.errors import UserError
from accel_train.evaluate import Evaluation
from accel_train.meter import Count, Stopwatch
from accel_train.run import RunDirectory
from accel_train.tracking import track

MARKER = "REQUEUE"  # its presence in the run's folder asks the job script to start the run again


class Report:
    """Speaks for all processes of the run, on the main one; on the others all of it does nothing."""

    def __init__(
        self, config: Config, plan: Plan, accelerator: Accelerator, run: RunDirectory, console: Console
    ) -> None:
        self.config, self.plan = config, plan
        self.accelerator, self.run, self.console = accelerator, run, console
        self._seconds = self._waiting = 0.0  # of the stopwatch, at the last line
        self._last = time.monotonic()  # when the last epoch's or evaluation's line was written
        self._failures = 0  # of checkpoints, made known so far

    def begin(
        self, state: TrainState, *, resumed: bool, splits: Splits, model: nn.Module, notes: Sequence[str]
    ) -> None:
        self.console.say(describe(self.config, self.plan, self.accelerator, splits, model))
        (self.run.path / MARKER).unlink(missing_ok=True)
        for note in notes:
            self.warn(note)
        # A run that was killed before its first checkpoint has lines, too.
        self.run.rewind(state.update, state.epoch)
        if resumed:
            self.run.event("resumed", update=state.update, processes=self.plan.processes)
            self.console.say(f"going on after update {state.update}, in epoch {state.epoch + 1}")
        self.run.status(
            "training",
            force=True,
            epoch=state.epoch + 1,
            update=state.update,
            updates=self._updates,
            left_out_updates=len(state.left_out),
        )

    @property
    def _updates(self) -> int:
        return self.config.epochs * self.plan.updates_per_epoch

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
        seconds = watch.lap() - self._seconds
        waiting = watch.waiting - self._waiting
        self._seconds, self._waiting = watch.seconds, watch.waiting
        figures: dict[str, Any] = {
            "loss": count.loss,
            "accuracy": count.accuracy,
            "lr": lr,
            "images_per_second": count.samples / max(seconds, 1e-9),
            "data_wait_fraction": min(1.0, waiting / max(seconds, 1e-9)),
        }
        epoch = state.epoch + 1
        self.console.train(state.update, epoch, **figures)
        self.run.log("train", epoch=epoch, update=state.update, **figures)
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
        epoch, now = state.epoch + 1, time.monotonic()
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
        self.run.log("checkpoint", epoch=state.epoch + 1, update=state.update, stalled_seconds=stalled, seconds=seconds)
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

    def interrupted(self, state: TrainState, reason: str) -> None:
        self.run.event("interrupted", update=state.update, reason=reason)
        self.run.status("interrupted", update=state.update, force=True)
        if self.run.writes:
            (self.run.path / MARKER).write_text(f"{state.update}\n")
        self.console.finish(
            f"Stopped by {reason} after update {state.update} of {self._updates}; nothing is lost.",
            {"run": str(self.run.path)},
            {"go on": f"{typed_program()} train {self.run.path}/config.yaml --output-dir {self.run.path}"},
        )

    def unsaved(self) -> int:
        """All is trained, but the last checkpoint is not on the disk: the run is not finished. The exit code."""
        run = self.run.path
        self.run.fail("the final checkpoint could not be written")
        again = {"once there is room": f"{typed_program()} train {run}/config.yaml --output-dir {run}"}
        self.console.finish("The final weights could not be saved: the run is not finished.", {"run": str(run)}, again)
        return 1

    def finished(self, state: TrainState, last: dict[str, Evaluation], wall_seconds: float) -> None:
        """result.json and the last screen. `last` has the final evaluations: "test", "test (ema)", "val", …"""
        config, run = self.config, self.run
        result = result_of(config, self.plan, state, last, wall_seconds)
        run.result(result)
        run.status("finished", force=True, epoch=config.epochs, update=state.update, eta_seconds=0)
        figures = {f"{name} accuracy": f"{found.accuracy:.2%}" for name, found in last.items()}
        if state.train_seconds:
            figures["speed"] = f"{result['images_per_second']:,.0f} images/s, {state.train_seconds:.1f} s of training"
        if state.left_out:
            figures["left out"] = f"{len(state.left_out)} updates that were not finite"
        figures["run"] = str(run.path)
        title = f"{config.recipe}: {config.epochs} epoch{'s' * (config.epochs > 1)}, {state.update} updates"
        self.console.finish(title, figures, next_steps(run.path))


def describe(config: Config, plan: Plan, accelerator: Accelerator, splits: Splits, model: nn.Module) -> str:
    """The first lines of a run: what is trained, where, and how a batch is shared."""
    sizes = {"training": splits.train, "validation": splits.validation, "test": splits.test}
    images = ", ".join(f"{len(source):,} {name}" for name, source in sizes.items() if source is not None)
    left_out = f", {splits.left_out} unreadable left out" if splits.left_out else ""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    world = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    precision = accelerator.mixed_precision.replace("no", "fp32")
    lines = {
        "recipe": f"{config.recipe}, {config.epochs} epoch{'s' * (config.epochs > 1)}",
        "data": f"{config.data.name}: {images} images of {len(splits.classes)} classes{left_out}",
        "model": f"{config.model.name}, {parameters:,} parameters",
        "device": f"{world} on {accelerator.device.type}, {precision}",
        "batch": f"{plan.batch_size} = {world} x {plan.accumulation} accumulation x {plan.micro_batch} images; "
        f"{plan.updates_per_epoch} updates an epoch",
        "run": str(config.output_dir),
    }
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def plan_text(config: Config, processes: int, accumulation: int) -> str:
    """What --config-only prints: the resolved configuration, then, as comments, what follows from it.

    Nothing is downloaded for it; without the data, the number of updates is not known.
    """
    lines = [
        f"# processes: {processes}",
        f"# accumulation: {accumulation}",
        f"# samples of a process in one forward pass: {config.batch_size // (processes * accumulation)}",
    ]
    try:
        samples = len(load_splits(config.data, config.seed, download=False).train)
        plan = Plan(samples, config.batch_size, processes, accumulation, config.data.drop_last)
        lines += [
            f"# training samples: {plan.samples}",
            f"# updates an epoch: {plan.updates_per_epoch}",
            f"# samples of an epoch's last update: {plan.real_samples(plan.updates_per_epoch - 1)}",
            f"# updates in all: {plan.updates_per_epoch * config.epochs}",
        ]
    except UserError as error:
        lines.append(f"# updates: not known ({error})")
    return to_yaml(config) + "\n".join(lines)


def result_of(
    config: Config, plan: Plan, state: TrainState, last: dict[str, Evaluation], wall_seconds: float
) -> dict[str, Any]:
    """The contents of result.json."""
    test, ema = last.get("test"), last.get("test (ema)")
    result: dict[str, Any] = {
        "recipe": config.recipe,
        "epochs": config.epochs,
        "updates": state.update,
        "left_out_updates": len(state.left_out),
        "world_size": plan.processes,
        "train_images": plan.samples,
        "test_images": test.count if test else 0,
        "test_loss": test.loss if test else None,
        "test_accuracy": test.accuracy if test else None,
        "test_top5_accuracy": test.top5_accuracy if test else None,
        "ema_test_loss": ema.loss if ema else None,
        "ema_test_accuracy": ema.accuracy if ema else None,
        "best_val_accuracy": state.best_accuracy,
        "best_update": state.best_update,
        "images_per_second": state.samples_seen / state.train_seconds if state.train_seconds else None,
        "train_seconds": state.train_seconds,
        "wall_seconds": wall_seconds,  # of the last start
    }
    if test:
        result |= {"class_accuracy": test.class_accuracy, "confusion": test.confusion}
    return result


def next_steps(run: Path) -> dict[str, str]:
    program = typed_program()
    return {
        "evaluate": f"{program} evaluate {run}",
        "predict": f"{program} predict {run} IMAGE…",
        "other recipes": f"{program} recipes",
    }


def typed_program() -> str:
    """What a person types to start this program: after `make train` it is not on their path yet."""
    if shutil.which("accel-train"):
        return "accel-train"
    return sys.argv[0] if Path(sys.argv[0]).name == "accel-train" else f"{sys.executable} -m accel_train"
