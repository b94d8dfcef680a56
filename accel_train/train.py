"""THE training script: a recipe in, a run directory out. It reads top to bottom.

    accel-train train digits
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m accel_train.train digits --epochs 5
    accelerate launch … accel_train/train.py digits

are the same program. What is learned is the same on any number of processes: see docs/guarantees.md.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # The command line is checked before torch is imported. Started by its path, the script stands in for the package's
    # parent folder on Python's path, not for the package itself, whose modules' names would hide those of others.
    from pathlib import Path

    if not __package__:
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from accel_train.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration, gather_object
from timm.layers import convert_sync_batchnorm

from accel_train import finished, full_state, models, optim, tuning
from accel_train.accelerator import create_accelerator, precision, precision_notice
from accel_train.agreement import decided_by_main
from accel_train.buckets import settle_buckets
from accel_train.changes import digest
from accel_train.checkpoint import Checkpoints
from accel_train.config import Config
from accel_train.console import Console
from accel_train.data.held_out import HeldOutTrial
from accel_train.data.keyed import key
from accel_train.data.loading import create_feed, normalization, start_workers_early
from accel_train.data.order import EvaluationOrder, Plan, TrainingOrder, accumulation_steps
from accel_train.data.sources import load_splits
from accel_train.evaluate import Batch, Evaluation, evaluate, evaluation_batch_size
from accel_train.launch import INTERRUPTED, Launch, at_terminal
from accel_train.meter import Meter, Stopwatch
from accel_train.nonfinite import Guard
from accel_train.owner import Claim, Lease
from accel_train.relaunch import command_to_go_on
from accel_train.rendezvous import check_agreement, check_shared_directory
from accel_train.report import Report
from accel_train.run import MARKER, RunDirectory
from accel_train.semantics import SEMANTICS
from accel_train.sharding import shard_batchnorm
from accel_train.signature import Signature
from accel_train.stopping import StopAskedError, Stopping
from accel_train.summary import plan_text
from accel_train.tracking import check_trackers, end_trackers, start_trackers
from accel_train.train_state import TrainState
from accel_train.watchdog import Watchdog, collective_seconds


def train(config: Config, launch: Launch) -> int:
    """Train as `config` says, or go on with the run in its output directory. Returns the program's exit code."""
    with Stopping() as stopping, ExitStack() as ends:  # from here on a signal asks for a checkpoint
        return _train(config, launch, stopping, ends)


def _train(config: Config, launch: Launch, stopping: Stopping, ends: ExitStack) -> int:
    began = time.monotonic()

    # The world: accumulation follows from it, and Accelerate must know that from the start.
    check_trackers(config.trackers)
    mixes = config.augment.mixup > 0 or config.augment.cutmix > 0
    accumulation = accumulation_steps(config.batch_size, launch.world_size, config.micro_batch_size, pairs=mixes)
    accelerator = create_accelerator(
        launch,
        gradient_accumulation_steps=accumulation,
        log_with=config.trackers,
        project_dir=config.output_dir or Path("runs"),
        rendezvous_seconds=config.rendezvous_timeout_seconds,
        collective_seconds=collective_seconds(config.start_timeout_seconds),
        share_gpus=config.share_gpus,
    )
    main, rank, device = accelerator.is_main_process, accelerator.process_index, accelerator.device
    tuning.set_defaults(device)
    tuning.check_compilation(accelerator)
    if config.config_only:
        if main:
            print(plan_text(config, accelerator, accumulation))
        return 0
    start_workers_early(config)

    # The run's directory: one for all processes, and theirs alone from here on. What is finished stays as it is.
    claim = Claim(config, lambda: stopping.reason)
    while (found := decided_by_main(accelerator, claim.attempt)) is None:
        pass  # another start has it, and may be dead
    lease = Lease(*found, keeps=main)
    ends.callback(lease.release)
    directory = lease.directory
    config = dataclasses.replace(config, output_dir=directory)
    accelerator.project_configuration = ProjectConfiguration(project_dir=str(directory))  # of trackers
    if main:
        with suppress(OSError):  # a finished run's directory may be one that cannot be written
            (directory / MARKER).unlink()
    earlier = decided_by_main(accelerator, lambda: finished.earlier_end(directory, config, launch))
    if earlier is not None and earlier.nothing_left:
        if main:
            print(f"{directory} holds a finished run: {directory / 'result.json'}. Nothing is left to do.")
        return 0

    # The data, and how an epoch of it becomes updates.
    splits = load_splits(config.data, config.seed)
    optim.check_schedule(config.schedule, splits)
    plan = Plan(len(splits.train), config.batch_size, launch.world_size, accumulation, config.data.drop_last)
    order = TrainingOrder(plan, config.seed, splits.unreadable)
    size = models.input_size(config.model, splits.image_size)
    check_agreement(
        accelerator, configuration=digest(config), samples=str(plan.samples), classes=" ".join(splits.classes)
    )

    trial = HeldOutTrial(splits, rank, launch.world_size)  # goes on while the model is made

    # The model. Its weights follow from the seed alone; EMA and optimizer come after the move to the device, for
    # they keep tensors, and before the wrapping, for it changes names.
    with accelerator.main_process_first() if config.model.pretrained else nullcontext():  # one of them downloads
        torch.manual_seed(key(config.seed, "weights"))
        model = models.create_model(
            config.model, num_classes=len(splits.classes), channels=splits.channels, image_size=size
        ).to(device)
    synchronises = config.model.sync_batchnorm and device.type == "cuda"  # torch has it for GPUs only
    if synchronises:
        model = convert_sync_batchnorm(model)
    layout = tuning.lay_out(accelerator, model)
    ema = optim.create_ema(config.ema, model)
    shard_batchnorm(accelerator, model)
    optimizer = optim.create_optimizer(config.optim, model, sharded=accelerator.is_fsdp2)
    schedule = optim.create_schedule(
        config.schedule, optimizer, epochs=config.epochs, updates_per_epoch=plan.updates_per_epoch
    )
    balanced = config.loss.class_weights == "balanced"
    weights = optim.balanced_class_weights(splits.train.labels, len(splits.classes)).to(device) if balanced else None
    criterion = optim.create_loss(config.loss, weights)
    # The schedule is not prepared: it is a function of the update's number, and Accelerate would count otherwise.
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = full_state.bare(model)
    clipped = optim.parameters_to_clip(config.optim, plain)  # FSDP2 has made new parameters
    optimizer = tuning.stepping(optimizer)
    kept = models.prepare_recomputation(model, config.model)
    shape = plan.micro_batch, splits.channels, size, size
    settle_buckets(accelerator, model, torch.zeros(shape, device=device).to(memory_format=layout))

    # The way of a sample from its source to the model.
    feed = partial(create_feed, config, splits, accelerator=accelerator, size=size, memory_format=layout)
    training = feed(splits.train, order, training=True)
    at_once = evaluation_batch_size(config, launch.world_size, plan.micro_batch)
    held_out = {
        split: feed(source, EvaluationOrder(len(source), at_once), training=False)
        for split, source in (("val", splits.validation), ("test", splits.test))
        if source is not None
    }

    trial.finish(accelerator)

    # The run: from its beginning, or from its newest checkpoint.
    decided_by_main(accelerator, lambda: bool(RunDirectory(directory, writes=True)))  # its error is everybody's
    run = RunDirectory(directory, writes=main, lease=lease)
    check_shared_directory(accelerator, directory)
    checkpoints = Checkpoints(
        directory / "checkpoints",
        config,
        accelerator,
        model,
        optimizer,
        samples=plan.samples,
        ema=ema and ema.module,
        schedule=schedule,
        lease=lease,
        pixels=splits.semantics,
    )
    ends.callback(checkpoints.wait)  # before the run is given back
    decided_by_main(accelerator, checkpoints.check_writable)
    again = earlier is not None and config.resume == "auto"  # a run that has ended once never begins anew
    restored = checkpoints.restore("must" if again else config.resume, config.allow_change)
    state = restored or TrainState()
    state.check_position(plan.samples, checkpoints.folder)
    if earlier is not None:
        decided_by_main(accelerator, lambda: earlier.set_aside(lease))
        checkpoints.notes.append(earlier.note)
    # Updates done beyond those of a run that had these settings from its start: with another batch size, say. Without
    # them the schedule's epochs are the data's.
    extra = state.update - plan.updates_until(state.epoch, state.epoch_samples)
    schedule.step_update(state.update - extra)
    native = splits.image_size if splits.train.in_memory else None
    signature = Signature(splits.classes, splits.channels, size, native, *normalization(config, splits), SEMANTICS)
    run.begin(
        config,
        signature,
        world_size=launch.world_size,
        devices=gather_object([str(device)]),
        precision=precision(accelerator),
    )
    start_trackers(config, accelerator)
    meter, watch = Meter(accelerator), Stopwatch(state.train_seconds, state.timed_samples)
    last: dict[str, Evaluation] = {}  # the newest of each split: "val", "test", and of EMA's weights "test (ema)"
    watchdog = Watchdog(
        accelerator, run, stopping, config.start_timeout_seconds, config.hang_timeout_seconds, launch.agent
    )
    console = Console(
        speaks=main,
        total_updates=config.epochs * plan.updates_per_epoch + extra,
        updates_per_epoch=plan.updates_per_epoch,
        epochs=config.epochs,
        first_update=state.update,
    )
    report = Report(config, plan, accelerator, run, console)
    guard = Guard(config, accelerator, model, optimizer, training.transform, report)

    def save(*, wait: bool = False) -> None:
        watchdog.note("saves a checkpoint")
        state.train_seconds, state.timed_samples = watch.lap(), watch.samples
        checkpoints.save(state, wait=wait)
        stopping.saved()
        report.saved(state, checkpoints)

    def go_back() -> TrainState:
        """The state of the last checkpoint, but for the updates that are left out from now on."""
        watch.stop()
        checkpoints.wait()
        position = checkpoints.restore("must", config.allow_change) or TrainState()
        position.left_out = state.left_out
        schedule.step_update(position.update - extra)
        meter.read()
        guard.rewound()
        report.rewound(position)
        return position

    def evaluate_split(split: str) -> None:
        def through(batches: Iterator[Batch]) -> Iterator[Batch]:
            return stopping.heeded(watchdog.watched(batches, f"evaluating {split}"))

        for name, evaluated in ((split, model), (f"{split} (ema)", ema and ema.module)):
            if evaluated is not None:
                optim.share_buffers(evaluated)
                last[name] = evaluate(accelerator, evaluated, held_out[split], through)
                report.evaluated(name, state, last[name])

    go_on = command_to_go_on(launch, directory)
    with watchdog, console, report.last_words(checkpoints, go_on):
        stopping.begin(directory if main else None, config.checkpoint.every_seconds, config.rendezvous_timeout_seconds)
        report.begin(
            state,
            resumed=restored is not None,
            splits=splits,
            model=model,
            size=size,
            placement=training.placement,
            notes=[*splits.notes, *checkpoints.notes],
        )
        if (notice := precision_notice(accelerator)) is not None:
            report.warn(notice)
        if config.model.sync_batchnorm and not synchronises and launch.world_size > 1:
            report.warn(f"model.sync_batchnorm: {device.type} has none; each process normalises by its own samples")
        if config.on_nonfinite == "rewind" and decided_by_main(accelerator, lambda: checkpoints.last_saved is None):
            save()  # something to go back to
        if state.epoch == config.epochs and decided_by_main(accelerator, lambda: checkpoints.last_saved is None):
            save(wait=True)  # trained to the end elsewhere: what is published is a checkpoint of this run
        try:
            while state.epoch < config.epochs:
                epoch, wanted = state.epoch, False
                order.seek(epoch, state.epoch_samples)
                models.set_train_mode(model, config.model)
                watch.start()
                for step, batch in enumerate(watch.timed(watchdog.watched(training.batches, "training"))):
                    micro_batch = step % accumulation
                    if micro_batch == 0:
                        guard.begin_update(state)
                    # The update's samples: its window of the epoch's order, but for unreadable ones that are left out.
                    window = plan.real_samples(state.epoch_samples)
                    samples = order.real_samples(state.epoch_samples)
                    with accelerator.accumulate(model):
                        # Dropout's masks follow from the position: a restart draws the same again.
                        tuning.seed(device, key(config.seed, "dropout", state.update, rank, micro_batch))
                        inputs, targets = training.transform(batch)
                        logits = model(inputs)
                        losses = criterion(logits, targets) * batch["weights"]
                        # The mean over the samples that are really in the update. Later DDP takes the mean over the
                        # processes and Accelerate divides by the accumulation steps: both are undone beforehand.
                        with models.buffers_kept(kept):
                            accelerator.backward(losses.sum() * (launch.world_size * accumulation / max(1, samples)))
                        guard.add(batch, losses)
                        meter.add(logits, targets, losses.detach(), batch["weights"])
                    if not accelerator.sync_gradients:
                        continue

                    if passed := guard.passes(state):
                        if config.optim.clip is not None:
                            accelerator.unscale_gradients(optimizer)
                            optim.clip_gradients(config.optim, clipped)
                        optimizer.step()
                    optimizer.zero_grad()

                    # The update is done, or left out because it was not finite.
                    rate = max(group["lr"] for group in optimizer.param_groups)  # layer decay: the last layer's
                    state.update += 1
                    state.epoch_samples += window
                    schedule.step_update(state.update - extra)
                    if passed:
                        meter.keep()
                        state.samples_seen += samples
                        state.epoch_left_out += window - samples
                        if ema is not None:
                            optim.update_ema(ema, plain, state.update)
                    else:
                        meter.drop()
                        state.epoch_left_out += window
                    watch.trained(samples)
                    report.advanced(state, checkpoints.last_saved)
                    watchdog.advance(state.update)
                    stop, wanted = stopping.agreed()
                    every = config.checkpoint.every_updates
                    wanted = wanted or (every is not None and state.update % every == 0)
                    ends_epoch = plan.updates_from(state.epoch_samples) == 0
                    due = stop or wanted or ends_epoch or state.update % config.log_every_updates == 0
                    if guard.rewinds(state, due=due):
                        break
                    if due:
                        count = meter.read()
                        state.epoch_loss_sum += count.loss_sum
                        state.epoch_correct += count.correct
                        state.epoch_count += count.samples
                        report.trained(state, count, rate, watch)
                    if stop:
                        raise StopAskedError
                    if wanted and not ends_epoch:
                        save()
                if guard.rewinds(state, due=True):
                    training.loader.end()  # it was left in its middle
                    state = go_back()
                    continue

                # An epoch is done. Its training figures were counted under way, over all of its samples.
                watch.stop()
                state.check_epoch(plan)
                report.trained_epoch(state)
                is_last, is_best = epoch + 1 == config.epochs, False
                is_due = is_last or (epoch + 1) % config.eval_every_epochs == 0
                if "val" in held_out and is_due:
                    evaluate_split("val")
                    accuracy = last["val (ema)" if ema else "val"].accuracy
                    is_best = state.best_accuracy is None or accuracy > state.best_accuracy
                    if is_best:
                        state.best_accuracy, state.best_update = accuracy, state.update
                    schedule.step(epoch + 1, accuracy)
                elif "test" in held_out and is_due and not is_last:
                    # The test is looked at along the way only where nothing else is, and nothing follows from it.
                    evaluate_split("test")
                state.begin_epoch(epoch + 1)
                if wanted or is_last or is_best or (epoch + 1) % config.checkpoint.every_epochs == 0:
                    save(wait=is_last)

            # The end: the weights where they are easily found, and only then the test, which may find a bad image.
            checkpoints.publish(state.update)
            if "test" in held_out:
                evaluate_split("test")
        except StopAskedError:
            save(wait=True)
            stopping.end()
            reason = stopping.reason or "another process's signal"
            code = decided_by_main(accelerator, lambda: report.interrupted(state, reason, checkpoints, go_on))
            accelerator.wait_for_everyone()  # the first to leave would take the others along
            return INTERRUPTED if reason == "SIGINT" and at_terminal() else code
        stopping.end()
        end_trackers(accelerator)
        report.failed(checkpoints)
        if main and checkpoints.last_saved != state.update:
            return report.unsaved(checkpoints, go_on)
        report.finished(state, last, watch, time.monotonic() - began)
        return 1 if checkpoints.failures or run.failures else 0
