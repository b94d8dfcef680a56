"""THE training script: a recipe in, a run directory out. It reads top to bottom.

    accel-train train digits
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m accel_train.train digits --epochs 5
    accelerate launch … accel_train/train.py digits

are the same program. What is learned is the same on any number of processes: see docs/guarantees.md.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # The command line is checked before torch is imported. Python puts the folder of a script that is started by its
    # path on the module path. That would be accel_train/, whose files could hide other modules: use its parent instead.
    from pathlib import Path

    if not __package__:
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from accel_train.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))

import dataclasses
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice

from accelerate import Accelerator
from torch import Tensor

from accel_train import models
from accel_train.config.compatibility import learning_fingerprint
from accel_train.config.schema import Config
from accel_train.data.held_out import HeldOutCheck
from accel_train.data.loading import start_workers_early
from accel_train.data.order.drawing import digest, sample_weights
from accel_train.data.sources.load import Splits, load_splits
from accel_train.errors import print_line
from accel_train.evaluate import Batch
from accel_train.launch.agreement import broadcast_from_main, check_agreement, fail_together
from accel_train.launch.environment import Launch
from accel_train.models.training_pass import unused_parameters_advice
from accel_train.optim.bitwise import seed_pass, what_bits_depend_on
from accel_train.optim.clipping import clip_gradients
from accel_train.optim.ema import update_ema
from accel_train.optim.micro_batch import LESS_MEMORY, memory_advice, training_advice
from accel_train.optim.schedule import check_schedule
from accel_train.ownership.claim import claim_run
from accel_train.records.code import code_hashes
from accel_train.records.directory import remove_requeue_marker
from accel_train.records.metrics import LOWER_IS_BETTER, best_metric, check_best_metric
from accel_train.records.summary import plan_text
from accel_train.records.trackers.sending import check_trackers
from accel_train.run.ending import finish, interrupt
from accel_train.run.finished import find_finished_run
from accel_train.run.run import Run
from accel_train.run.start import find_start
from accel_train.run.stopping import StopAskedError, StopRequests
from accel_train.training_setup import TrainingSetup, connect, create_training_setup
from accel_train.user_code.reference import parse_reference


def train(config: Config, launch: Launch) -> int:
    """Start the run of `config`, or continue the run in its output directory. Returns the program's exit code.

    Raises UserError; UnsavedError if the training ended, but its weights or result could not be written.
    """
    with StopRequests() as stop_requests, ExitStack() as at_end:  # from here on a signal asks for a checkpoint
        began = time.monotonic()  # for wall_seconds of result.json
        check_trackers(config.trackers)
        accelerator = connect(config, launch)
        start = find_start(config, accelerator)
        config = start.config
        if config.config_only:
            if accelerator.is_main_process:
                print(plan_text(config, accelerator))
            return 0
        start_workers_early(config)  # the server of data workers imports torch while this process goes on

        # From here on, these processes alone own the run directory. A finished run is not changed.
        lease = claim_run(config, accelerator, lambda: stop_requests.reason)
        at_end.callback(lease.release)
        directory = lease.directory
        config = dataclasses.replace(config, output_dir=directory)
        if accelerator.is_main_process:
            remove_requeue_marker(directory)
        finished = broadcast_from_main(accelerator, lambda: find_finished_run(directory, config, launch))
        if finished is not None and finished.nothing_left:
            if accelerator.is_main_process:
                print_line(f"{directory} holds a finished run: {directory / 'result.json'}. Nothing is left to do.")
            return 0

        splits = load_data(config, accelerator)
        # Tries to open the images of validation and test in the background, while the model is created.
        check = HeldOutCheck(splits, launch.rank, launch.world_size)
        with memory_advice(f"at the start, before the first update: {LESS_MEMORY}"):
            setup = create_training_setup(
                config, launch, accelerator, splits, weights=start.weights, published=not start.resumes
            )
        setup = dataclasses.replace(setup, warnings=(*setup.warnings, *check.finish(accelerator)))
        run = Run(setup, lease, finished, stop_requests, began)
        with run, memory_advice(training_advice(setup.plan)), unused_parameters_advice():
            try:
                fit(setup, run)
            except StopAskedError:
                return interrupt(run)
            return finish(run)


def load_data(config: Config, accelerator: Accelerator) -> Splits:
    """The dataset with its splits. Raises UserError unless all processes have the same."""
    check_agreement(accelerator, code=code_hashes(config))  # before the user's own code runs

    def load() -> Splits:
        return load_splits(config.data, config.seed, record=config.output_dir)

    # Only a user's Dataset may be loaded by all processes together; then they find its mistakes together.
    is_users = parse_reference("data.name", config.data.name) is not None
    splits = load() if is_users else fail_together(accelerator, load)
    check_schedule(config.schedule, splits)
    check_best_metric(config, splits)
    weights = sample_weights(config, splits.train.labels, splits.train_weights, splits.unreadable)
    check_agreement(
        accelerator,
        configuration=learning_fingerprint(config),
        samples=str(len(splits.train)),
        classes=" ".join(splits.classes),
        table=splits.table,
        **({} if weights is None else {"how often samples are drawn": digest(weights)}),
        **(what_bits_depend_on(accelerator) if config.bitwise else {}),
    )
    return splits


def fit(setup: TrainingSetup, run: Run) -> None:
    """Train the remaining epochs, then test. Raises StopAskedError."""
    while run.state.stopped_by(setup.config) is None:
        if train_epoch(setup, run):
            end_epoch(setup, run)
        else:
            run.rewind()
    # Publish the weights before the test, which may fail because of an unreadable image.
    run.checkpoints.publish_weights(run.state.update)
    if "test" in setup.evaluations:
        run.evaluate("test")


def train_epoch(setup: TrainingSetup, run: Run) -> bool:
    """Train the rest of the current epoch. Returns False if the run must return to its last checkpoint."""
    state, plan, sampler = run.state, setup.plan, setup.sampler
    sampler.seek(state.epoch, state.epoch_samples)
    models.set_train_mode(setup.model, setup.config.model)
    run.stopwatch.start()
    for micro_batches in grouped(run.batches(), plan.accumulation):
        # The update takes a window of the epoch's order, which begins after the first `epoch_samples` of it. Some of
        # the window's samples may be unreadable: `samples` are those that are really in the update.
        window, samples = plan.real_samples(state.epoch_samples), sampler.real_samples(state.epoch_samples)
        lr = max(group["lr"] for group in setup.optimizer.param_groups)  # with layer decay: the last layer's
        applied = update(setup, run, micro_batches, samples)
        then = run.end_update(applied=applied, window=window, samples=samples, lr=lr)
        if then == "rewind":
            return False
        if then == "stop":
            raise StopAskedError
        if then == "save":
            run.save()
    # Whether the last update was finite is read only now: see run/nonfinite.py.
    must_rewind = run.guard.rewinds(state, due=True)
    return not must_rewind


def update(setup: TrainingSetup, run: Run, micro_batches: Iterable[Batch], samples: int) -> bool:
    """Make one update with the mean gradient of `samples` samples. Returns False if it was skipped as not finite."""
    config, accelerator, state, guard = setup.config, setup.accelerator, run.state, run.guard
    exact = setup.exact_gradients  # with --bitwise: sums the gradients itself, DDP does not
    graphs, padded = setup.graphs, samples < config.batch_size
    compute, apply = partial(compute_gradients, setup, samples), partial(apply_gradients, setup, state.update + 1)
    guard.start(state)  # the guard looks for losses and gradients that are not finite
    for number, batch in enumerate(micro_batches):
        if exact and setup.plan.is_empty(accelerator.process_index, number):
            continue  # the processes cannot share the batch evenly, and no other waits for this one's gradients
        with accelerator.no_sync(setup.model) if exact else accelerator.accumulate(setup.model):
            seed_pass(config, accelerator, state.update, number)  # for random numbers that are not drawn by sample
            setup.set_samples(batch, state.update)
            logits, targets, losses = compute(batch) if graphs is None or padded else graphs.compute(compute, batch)
            if exact:
                exact.add()
            guard.record(batch, losses)
            run.meter.add(logits, targets, losses, batch["weights"])
    if exact:
        exact.finish(max(1, samples))
    applied = guard.check_step(state)
    if not applied:
        setup.virtual_batches.discard()
        setup.optimizer.zero_grad(set_to_none=graphs is None)
    elif graphs is None:
        apply()
    else:
        graphs.apply(apply, state.update + 1, padded=padded)
    setup.schedule.step_update(state.update + 1 - run.extra_updates)  # extra: of a run with another batch size before
    return applied


def compute_gradients(setup: TrainingSetup, samples: int, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gradients of a micro-batch to those of its update, which has `samples` samples.

    Returns logits [b, classes], targets and the losses [b] times the weights of the samples, all without gradient.
    """
    # DDP will average over processes and Accelerate divide by the accumulation steps; multiply by both to cancel that.
    scale = setup.accelerator.num_processes * setup.plan.accumulation / max(1, samples)
    logits, targets = setup.forward(batch, padded=samples < setup.config.batch_size)
    losses = setup.criterion(logits, targets) * batch["weights"]  # [b]; padding has weight 0
    with models.preserve_buffers(setup.recomputed_buffers):  # from gradient checkpointing
        setup.accelerator.backward(losses.sum() * (1.0 if setup.exact_gradients else scale))
    setup.virtual_batches.keep()
    return logits.detach(), targets, losses.detach()


def apply_gradients(setup: TrainingSetup, update: int) -> None:
    """Let the optimizer take its step of `update`, counted from 1, and move statistics and EMA."""
    if setup.config.optim.clip is not None:
        setup.accelerator.unscale_gradients(setup.optimizer)
        clip_gradients(setup.config.optim, setup.clipped)
    setup.optimizer.step()
    setup.virtual_batches.end_update()
    if setup.ema is not None:
        update_ema(setup.ema, setup.bare_model, update)
    setup.optimizer.zero_grad(set_to_none=setup.graphs is None)


def end_epoch(setup: TrainingSetup, run: Run) -> None:
    """Evaluate, update the best result, save if due, and go to the next epoch."""
    config, state = setup.config, run.state
    run.stopwatch.stop()
    state.check_epoch(setup.plan)
    run.log.log_epoch(state)
    run.count_time()
    done, is_best = state.epoch + 1, False
    is_last = done == config.epochs or state.out_of_time(config)
    if is_last or done % config.eval_every_epochs == 0:
        if "val" in setup.evaluations:
            metric = best_metric(config, multi_label=setup.splits.multi_label)
            figure, lower = run.evaluate("val").deciding(metric), metric in LOWER_IS_BETTER
            is_best = state.record_best(figure, done, lower=lower)
            setup.schedule.step(done, -figure if lower else figure)
        elif "test" in setup.evaluations and not is_last:
            # Without a validation split, test during training; nothing is decided by the result. After the last epoch
            # `fit` tests anyway.
            run.evaluate("test")
    state.begin_epoch(done)
    is_last = state.stopped_by(config) is not None
    if run.save_is_due or is_last or is_best or done % config.checkpoint.every_epochs == 0:
        run.save(wait=is_last)


def grouped(batches: Iterator[Batch], size: int) -> Iterator[Iterator[Batch]]:
    """Yields iterators of `size` batches each. A batch is fetched when it is requested: memory holds only one."""
    for first in batches:
        yield chain((first,), islice(batches, size - 1))
