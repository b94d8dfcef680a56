"""What a recipe computes, taken apart for `accel-train bench`: the bare loop, the input, and pieces of an update alone.

Model, optimizer and input are made as train.py makes them, but none of the rest is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from timm.layers import convert_sync_batchnorm
from torch import Tensor

from accel_train import models
from accel_train.bench.clock import Clock
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.schema import Config
from accel_train.data.loading import create_feed
from accel_train.data.order.plan import Plan, TrainingOrder, accumulation_steps
from accel_train.data.sources.load import Splits
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.consensus import decided_by_main
from accel_train.launch.environment import Launch
from accel_train.optim.optim import create_loss, create_optimizer
from accel_train.optim.performance import check_compilation, lay_out, set_defaults, stepping
from accel_train.optim.sharding import shard_batchnorm
from accel_train.records.console import Console
from accel_train.records.directory import RunDirectory
from accel_train.records.meter import Meter
from accel_train.records.run_log import Report
from accel_train.run.nonfinite import Guard

KINDS = 4  # different micro-batches that the bare loop takes in turns
PIECE_SECONDS = 0.5  # a piece is repeated for about so long


class Workload:
    """A recipe's model and input on this process's device. Collective: all processes make the same calls."""

    def __init__(self, config: Config, launch: Launch, splits: Splits) -> None:
        self.config = config
        self.accumulation = accumulation_steps(
            config.batch_size,
            launch.world_size,
            config.micro_batch_size,
            pairs=config.augment.mixup > 0 or config.augment.cutmix > 0,
        )
        self.accelerator: Accelerator = create_accelerator(launch, gradient_accumulation_steps=self.accumulation)
        self.device: torch.device = self.accelerator.device
        set_defaults(self.device)
        check_compilation(self.accelerator)
        self.plan = Plan(
            len(splits.train), config.batch_size, launch.world_size, self.accumulation, config.data.drop_last
        )
        self.order = TrainingOrder(self.plan, config.seed, splits.unreadable)
        self.size = models.input_size(config.model, splits.image_size)

        torch.manual_seed(0)
        model = models.create_model(
            config.model,
            num_classes=len(splits.classes),
            channels=splits.channels,
            image_size=self.size,
            published=False,
        ).to(self.device)
        if config.model.sync_batchnorm and self.device.type == "cuda":
            model = convert_sync_batchnorm(model)
        layout = lay_out(self.accelerator, model)
        shard_batchnorm(self.accelerator, model)
        optimizer = create_optimizer(config.optim, model, sharded=self.accelerator.is_fsdp2)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # a step costs the same, and the weights stay: nothing can diverge
        self.criterion = create_loss(config.loss, None)
        self.model, prepared = self.accelerator.prepare(model, optimizer)
        self.optimizer = stepping(prepared)
        self.kept = models.prepare_recomputation(self.model, config.model)
        models.set_train_mode(self.model, config.model)
        self.feed = create_feed(
            config,
            splits,
            splits.train,
            self.order,
            self.accelerator,
            training=True,
            size=self.size,
            memory_format=layout,
        )
        # Tensors that already lie on the device; the first pass is the input's own warm-up, too.
        self.batches = list(self._raw(-(-KINDS // self.accumulation)))[:KINDS]
        self.examples = [self.feed.transform(batch) for batch in self.batches]

    def _clock(self) -> Clock:
        """Of work that all processes do: from when the last one begins until the last one's device has ended."""
        return Clock(self.device, self.accelerator.wait_for_everyone)

    def _raw(self, updates: int) -> Iterator[dict[str, Tensor]]:
        """The micro-batches of `updates` updates. Each epoch begins late enough to be iterated to its end."""
        epoch = 0
        while updates > 0:
            some = min(updates, self.plan.updates_per_epoch)
            self.order.seek(epoch, (self.plan.updates_per_epoch - some) * self.plan.batch_size)
            yield from self.feed.batches
            epoch, updates = epoch + 1, updates - some

    def input_seconds(self, updates: int, warm_up: int) -> float:
        """For the input of `updates` updates alone: loaded, moved to the device and transformed."""
        clock = self._clock()
        for number, batch in enumerate(self._raw(warm_up + updates)):
            if number == warm_up * self.accumulation:
                clock.start()
            self.feed.transform(batch)
        return clock.stop()

    def bare_seconds(self, updates: int, warm_up: int) -> float:
        """For `updates` updates of the bare loop: forward, backward, step, on tensors that lie on the device."""
        clock = self._clock()
        examples = cycle(self.examples)
        for number in range(warm_up + updates):
            if number == warm_up:
                clock.start()
            self._backward(examples)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return clock.stop()

    def _backward(self, examples: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Forward and backward of an update; logits and losses of its last micro-batch."""
        scaler = self.accelerator.scaler
        for micro_batch in range(self.accumulation):
            is_last = micro_batch + 1 == self.accumulation
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                inputs, targets = next(examples)
                logits = self.model(inputs)
                losses = self.criterion(logits, targets)
                loss = losses.mean() / self.accumulation
                with models.buffers_kept(self.kept):
                    (loss if scaler is None else scaler.scale(loss)).backward()
        return logits.detach(), losses.detach()

    def piece_seconds(self) -> dict[str, float]:
        """Of one update each, alone: its augmentation, its optimizer's step, its metrics and the guard's look."""
        logits, losses = self._backward(cycle(self.examples))
        batch, (_, targets) = self.batches[-1], self.examples[-1]
        silent = Console(speaks=False, total_updates=1, updates_per_epoch=1, epochs=1)
        nowhere = RunDirectory(Path(), writes=False)
        report = Report(self.config, self.plan, self.accelerator, nowhere, silent)
        guard = Guard(self.config, self.accelerator, self.model, self.optimizer, self.feed.transform, report)
        meter, state = Meter(self.accelerator), TrainState()

        def augment() -> None:
            for _ in range(self.accumulation):
                self.feed.transform(batch)

        def count() -> None:
            guard.begin_update(state)
            for _ in range(self.accumulation):
                guard.add(batch, losses)
                meter.add(logits, targets, losses * batch["weights"], batch["weights"])
            guard.passes(state)
            meter.keep()

        found = {"augmentation": self._mean_seconds(augment), "metrics": self._mean_seconds(count)}
        return {**found, "optimizer": self._mean_seconds(self.optimizer.step)}

    def _mean_seconds(self, piece: Callable[[], Any]) -> float:
        clock = self._clock()
        for times in (2, 5):  # the first ones are a warm-up
            clock.start()
            for _ in range(times):
                piece()
            seconds = clock.stop() / times
        wanted = min(1000, max(5, round(PIECE_SECONDS / max(seconds, 1e-9))))
        times = decided_by_main(self.accelerator, lambda: wanted)
        clock.start()
        for _ in range(times):
            piece()
        return clock.stop() / times
