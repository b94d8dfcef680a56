"""THE training script: a recipe in, a run directory out. It reads top to bottom.

    accel-train train digits
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m accel_train.train digits --epochs 5
    accelerate launch … accel_train/train.py digits

are the same program. A run gives the same result on any number of processes: see docs/guarantees.md.

What `train` uses is in these files:

    the order of samples    data/order.py               the learning rate    optim/schedule.py
    forward and backward    step.py                     metrics              task.py; your own: records/metrics.py
    checkpoints             checkpoint/store.py         an evaluation        evaluate.py
    their commit            checkpoint/directory.py     the end of a run     run/run.py
    signals and stops       launch/stopping.py          who owns a run       ownership/owner.py
    losses that are NaN     step.py                     who may take it      ownership/claim.py
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # The command line is checked before torch is imported. If a script is started by its path, Python looks for modules
    # in the script's folder. That is accel_train/ here, and its files could hide other modules: use the parent folder.
    from pathlib import Path

    if not __package__:
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from accel_train.cli import program

    program(["train", *sys.argv[1:]])

import dataclasses
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from accel_train import models
from accel_train.config.schema import Config
from accel_train.data.loading import start_workers_early
from accel_train.evaluate import Batch
from accel_train.launch.agreement import broadcast_from_main, fail_together, naming_lost_processes
from accel_train.launch.environment import Launch
from accel_train.launch.stopping import StopAskedError, StopRequests
from accel_train.optim.performance import LESS_MEMORY, memory_advice
from accel_train.records.metrics import create_own_metrics
from accel_train.run.observers import check_observers
from accel_train.run.run import Run, TrainingResult, finish, interrupt
from accel_train.run.start import claim_directory, find_result, find_start, load_data
from accel_train.task import LOWER_IS_BETTER
from accel_train.training_setup import Preflight, TrainingSetup, connect, create_training_setup, import_libraries


def train(
    config: Config, launch: Launch, *, observers: Sequence[object] = (), preflight: Preflight | None = None
) -> TrainingResult:
    """Start the run of `config`, or continue the run in its output directory.

    `observers`: see run/observers.py. `preflight`: checks the machine and the data of a new run, not of one that
    resumes. Raises UserError; UnsavedError if the training ended, but its weights or result could not be written.
    """
    check_observers(observers)
    with StopRequests() as stop_requests, ExitStack() as at_end:  # from here on a signal asks to save and stop
        began = time.monotonic()  # for wall_seconds of result.json
        with naming_lost_processes():  # if another process dies, the error says so; later the watchdog does that
            accelerator = connect(config, launch)
            start = find_start(config, accelerator)
            config = start.config
            start_workers_early(config)  # they import torch while this process goes on

            # From here on, these processes alone own the run directory.
            lease = claim_directory(config, accelerator, lambda: stop_requests.reason)
            at_end.callback(lease.release)
            directory = lease.directory
            config = dataclasses.replace(config, output_dir=directory)
            result = broadcast_from_main(accelerator, lambda: find_result(directory, config))
            if result is not None:  # nothing is left to train
                return TrainingResult(directory, True, result.get("stopped_by"), result, nothing_left=True)
            finish_preflight = None if preflight is None or start.resumes else preflight(config, launch, accelerator)

            fail_together(accelerator, lambda: import_libraries(config))
            splits = load_data(config, accelerator, lambda: stop_requests.reason)
            own_metrics = create_own_metrics(config.metrics, accelerator, splits)
            with memory_advice(f"at the start, before the first update: {LESS_MEMORY}"):
                setup = create_training_setup(
                    config, launch, accelerator, splits, weights=start.weights, pretrained=not start.resumes
                )
            setup = dataclasses.replace(setup, own_metrics=own_metrics)
            if finish_preflight is not None:
                finish_preflight(setup)
            run = Run(setup, lease, stop_requests, began, observers)
        with run.watched():
            try:
                fit(setup, run)
            except StopAskedError:
                return interrupt(run)
            return finish(run)


def fit(setup: TrainingSetup, run: Run) -> None:
    """Train the remaining epochs, then test. Raises StopAskedError."""
    while run.state.stopped_by(setup.config, setup.plan) is None:
        train_epoch(setup, run)
        end_epoch(setup, run)
    # Publish the weights before the test, which may fail because of an unreadable image.
    run.checkpoints.publish_weights(run.state.update)
    if "test" in setup.evaluations:
        run.evaluate("test")


def train_epoch(setup: TrainingSetup, run: Run) -> None:
    """Train the rest of the current epoch. Raises StopAskedError."""
    state, sampler = run.state, setup.sampler
    sampler.seek(state.epoch, state.epoch_samples)
    if len(sampler) and state.evaluation_is_pending(setup.config):  # the run stopped before it was done
        evaluate_within_epoch(setup, run)
    models.set_train_mode(setup.model, setup.config.model, state.epoch)
    run.stopwatch.start()
    for size, micro_batches in sampler.updates(run.batches()):
        applied = update(setup, run, micro_batches, size.samples)
        run.count_update(size, applied=applied)
        due = run.due(ends_epoch=size.is_last)
        if due.log:
            run.guard.check_previous()  # an update with a NaN or infinite loss or gradient is never logged or saved
            run.log_update()
        if due.stop:
            raise StopAskedError
        if due.evaluate:
            evaluate_within_epoch(setup, run)
        elif due.save:
            run.save()


def update(setup: TrainingSetup, run: Run, batches: Iterable[Batch], samples: int) -> bool:
    """Make one update with the mean gradient of `samples` samples. Returns False if it was skipped as not finite."""
    step, state = setup.step, run.state
    for batch in step.micro_batches(batches, state.update, samples):
        inputs, targets = setup.training.transform(batch)
        logits = step.forward(inputs)
        losses = setup.criterion(logits, targets) * batch["weights"]  # [b]; padding has weight 0
        step.backward(losses)
        run.meter.add(logits.detach(), targets, losses.detach(), batch["weights"])
    applied = run.guard.check_step(state, step.computed)  # looks for losses and gradients that are not finite
    if applied:
        step.apply(state.update + 1)
    else:
        step.discard()
    # Also after a skipped update: the schedule counts all updates. The offset: see run/run.py.
    setup.schedule.step_update(state.update + 1 - run.schedule_offset)
    return applied


def end_epoch(setup: TrainingSetup, run: Run) -> None:
    """Evaluate, update the best result, save if due, and begin the next epoch, unless the run ends within this one."""
    config, state, plan = setup.config, run.state, setup.plan
    run.stopwatch.stop()
    state.check_epoch(plan)
    run.log_epoch()
    run.count_time()
    done = state.epoch + 1
    is_best = False
    is_last = plan.is_end(state.epoch, state.epoch_samples) or state.out_of_time(config)
    by_epoch = is_last or done % config.eval_every_epochs == 0
    if by_epoch or state.evaluation_is_pending(config):
        is_best = evaluate(setup, run, is_last=is_last, moves_plateau=by_epoch)
    if plan.updates_from(state.epoch_samples) == 0:
        state.begin_epoch(done)
    else:
        state.evaluated = state.update
    is_last = state.stopped_by(config, plan) is not None
    if run.save_is_due or is_last or is_best or done % config.checkpoint.every_epochs == 0:
        run.save(wait=is_last)


def evaluate_within_epoch(setup: TrainingSetup, run: Run) -> None:
    """Evaluate between two updates of an epoch, save if that is due or the result is the best, and train on."""
    run.stopwatch.stop()
    is_best = evaluate(setup, run, is_last=False, moves_plateau=False)
    run.state.evaluated = run.state.update
    if run.save_is_due or is_best:
        run.save()
    models.set_train_mode(setup.model, setup.config.model, run.state.epoch)
    run.stopwatch.start()


def evaluate(setup: TrainingSetup, run: Run, *, is_last: bool, moves_plateau: bool) -> bool:
    """Evaluate the validation split, or the test split without one; return whether the result is the best so far."""
    config = setup.config
    done = run.state.epoch + 1
    if "val" in setup.evaluations:
        metric = config.best_metric or setup.splits.task.best_metric
        lower_is_better = LOWER_IS_BETTER if setup.own_metrics is None else setup.own_metrics.lower_is_better
        is_lower_better = metric in lower_is_better
        value = run.evaluate("val").value_to_choose_by(metric)
        if moves_plateau:
            setup.schedule.step(done, -value if is_lower_better else value)
        return run.state.record_best(value, done, lower=is_lower_better)
    if "test" in setup.evaluations and not is_last:
        # The result decides nothing. After the last epoch `fit` tests anyway.
        run.evaluate("test")
    return False
