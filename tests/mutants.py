"""Changes one important line of the program at a time, and says whether the tests of its room notice.

    python tests/mutants.py                        # all of them: half an hour on one core
    python tests/mutants.py --only fsync --jobs 2  # those whose file, lines or promise have this word

Each mutant breaks a promise: a checkpoint that is not on the disk when it is called complete, a box of CutMix at the
wrong place. It is applied to a copy of the program; the checkout stays as it is. If a mutant survives, a test is
missing: write it, in the room of the changed file. tests/test_mutants.py holds that this list follows the code.
"""
# ruff: noqa: E501 -- the lines of the program are as long as they are

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("accel_train", "tests", "docs", "accelerate_configs", "slurm", "pbs", "pyproject.toml")
LIMIT_SECONDS = 600


class Mutant(NamedTuple):
    file: str
    """In accel_train/."""
    before: str
    """A fragment that the file has exactly once."""
    after: str
    tests: str
    """The test files that must notice, in tests/, with spaces between them."""
    promise: str
    """What the change breaks."""
    reason: str = ""
    """Why the tests are not in the room of the file, if they are not."""


DIRECTORY, STORE, STATE = "checkpoint/directory.py", "checkpoint/store.py", "checkpoint/train_state.py"
LEASE, OWNER = "ownership/lease.py", "ownership/owner.py"
START, NONFINITE = "run/start.py", "run/nonfinite.py"
RUN, WATCHDOG = "run/run.py", "run/watchdog.py"
PLAN, SAMPLERS = "data/order.py", "data/order.py"
PARAMETERS, BATCH, IMAGE = (f"data/transforms/{name}.py" for name in ("parameters", "batch", "image"))
TASK, METRICS, EVALUATE, RECORDS = "task.py", "records/metrics.py", "evaluate.py", "records/directory.py"
VIRTUAL, KEYS = "models/batchnorm.py", "models/dropout.py"
AGREEMENT, ACCELERATOR, STOPPING = (f"launch/{name}.py" for name in ("agreement", "accelerator", "stopping"))
OPTIONS = "config/options.py"

MUTANTS = [
    # Files and checkpoints
    Mutant("files.py", "            os.fsync(file.fileno())", "            pass",
           "test_files.py", "a durable file is on the disk before it gets its name"),
    Mutant("files.py", "        os.fsync(descriptor)", "        pass",
           "test_files.py", "fsync waits for the disk"),
    Mutant("files.py", "        check()\n        temporary.replace(path)", "        temporary.replace(path)\n        check()",
           "test_files.py", "whoever may no longer write replaces no file"),
    Mutant(DIRECTORY, "(*files, manifest, temporary)", "(manifest, temporary)",
           "checkpoint/test_directory.py", "fsync: a checkpoint's files are on the disk before its rename"),
    Mutant(DIRECTORY, "(*files, manifest, temporary)", "(*files, manifest)",
           "checkpoint/test_directory.py", "fsync: the list of a checkpoint's files is on the disk before its rename"),
    Mutant(DIRECTORY, "        raise\n    fsync(folder)\n", "        raise\n",
           "checkpoint/test_directory.py", "fsync: a checkpoint's name is on the disk when it is called complete"),
    Mutant(DIRECTORY, "            fsync(path)\n        check()\n        if place.exists():\n            place.rename(old)\n"
           "        temporary.rename(place)",
           "            pass\n        check()\n        if place.exists():\n            place.rename(old)\n"
           "        temporary.rename(place)\n        for path in place.iterdir():\n            fsync(path)",
           "checkpoint/test_directory.py", "the order of commit: write, fsync, rename"),
    Mutant(DIRECTORY, "        for path in (*files, manifest, temporary):\n            fsync(path)\n        check()",
           "        check()\n        for path in (*files, manifest, temporary):\n            fsync(path)",
           "checkpoint/test_directory.py", "the owner is checked right before the rename, not before a slow disk is waited for"),
    Mutant(DIRECTORY, "        if old.exists() and not place.exists():\n            old.rename(place)", "        pass",
           "checkpoint/test_directory.py", "a replacement that fails between its two renames gives the old checkpoint back"),
    Mutant(DIRECTORY, "    place.rename(gone)\n    shutil.rmtree(gone)", "    shutil.rmtree(place)",
           "checkpoint/test_directory.py", "a deleted checkpoint loses its name first, so that no part of it is visible"),
    Mutant(DIRECTORY, "sorted(updates)[-keep:]", "sorted(updates)[:keep]",
           "checkpoint/test_directory.py", "keep-last: the newest checkpoints are kept"),
    Mutant(DIRECTORY, "        if sha256(path) != digest:", "        if False:",
           "checkpoint/test_directory.py", "an altered byte is found"),
    Mutant(STORE, "self.keep, best)", "self.keep, None)",
           "checkpoint/test_resume.py", "keep-best: the best checkpoint is kept"),
    Mutant(STORE, ", check=self.lease.check)", ")",
           "checkpoint/test_resume.py", "the owner is checked before a checkpoint is committed"),
    Mutant(STORE, "                self.lease.check()\n                delete_checkpoint", "                delete_checkpoint",
           "checkpoint/test_resume.py", "whoever has lost the run deletes no checkpoint"),
    Mutant(STORE, "        started = time.perf_counter()\n        self.wait()\n", "        started = time.perf_counter()\n",
           "checkpoint/test_resume.py", "one checkpoint is written at a time"),
    Mutant("checkpoint/state_dict.py", "whole.detach().to(\"cpu\", copy=True)", "whole.detach().to(\"cpu\")",
           "checkpoint/test_resume.py", "a checkpoint is of the moment of its save, although training goes on"),
    Mutant(STORE, "            self.failures.append(f\"checkpoint of", "            str(f\"checkpoint of",
           "checkpoint/test_resume.py", "a save that failed is counted"),
    Mutant(STORE, "ema = self._snapshot.ema or model", "ema = model",
           "checkpoint/test_resume.py", "the EMA is restored as it was saved"),
    Mutant(STORE, "            self.accelerator.scaler.load_state_dict(plan.state[\"scaler\"])", "            pass",
           "checkpoint/test_resume.py", "the loss scaler is restored"),
    Mutant(DIRECTORY, "            if is_late(folder.parent, json_object(read_regular_file(path / \"state.json\")) or {}, update):", "            if False:",
           "checkpoint/test_resume.py", "a checkpoint that an earlier owner wrote late is not resumed from"),
    Mutant(STORE, "        position.forget_best()", "        pass",
           "checkpoint/test_resume.py", "the best value of another metric no longer counts"),
    Mutant(STATE, "math.isfinite(value) and (best is None", "(best is None",
           "checkpoint/test_train_state.py", "a first figure of NaN is never the best"),
    Mutant(STATE, "value < best if lower else value > best", "value > best",
           "checkpoint/test_train_state.py", "of losses the lowest is the best"),
    Mutant(STATE, "self.epoch - self.best_epoch >= patience", "self.epoch - self.best_epoch > patience",
           "checkpoint/test_train_state.py", "the run ends after exactly so many epochs without progress"),
    # Ownership
    Mutant(LEASE, "max(age, silent) >= STALE_SECONDS and silent >= CONFIRM_SECONDS", "age >= STALE_SECONDS",
           "ownership/test_claim.py", "a lease expires by this host's clock, too, not by the file's age alone"),
    Mutant(LEASE, "max(age, silent) >= STALE_SECONDS", "age >= STALE_SECONDS",
           "ownership/test_claim.py", "a lease expires although the file's age is wrong"),
    Mutant(LEASE, "if dead or self.take_over:", "if dead:",
           "ownership/test_claim.py", "--take-over takes the run of a living owner"),
    Mutant(LEASE, "                remove_unfinished_writes(directory)", "                pass",
           "ownership/test_lease.py", "a late sleeper: what an earlier owner was writing never gets its name"),
    Mutant(OWNER, "if self.owner is None or self.owner.machine != machine_id():", "if self.owner is None:",
           "ownership/test_claim.py", "process numbers of another host say nothing"),
    Mutant(OWNER, "    if (removed.owner, removed.inode) != (judged.owner, judged.inode):", "    if False:",
           "ownership/test_claim.py", "a start removes the dead owner that it has judged, and no other one"),
    Mutant(OWNER, "if owner is not None and owner == renew:", "if renew is not None:",
           "ownership/test_lease.py", "nobody gives signs of life for another owner"),
    Mutant(LEASE, "                if read_owner(self.directory / FILE).owner == self.owner:", "                if True:",
           "ownership/test_lease.py", "an owner that has lost the run does not release the next one's"),
    Mutant(LEASE, "if last_begun(self.directory)[0] > self.generation > 0:", "if False:",
           "ownership/test_lease.py", "a late sleeper does not take a finished run back"),
    Mutant(LEASE, "                if written:\n                    file.truncate(size)\n", "",
           "ownership/test_lease.py", "a line is appended whole or not at all"),
    Mutant(LEASE, "        with open_to_write(path, \"ab\", buffering=0) as file:\n            self.check()",
           "        self.check()\n        with open_to_write(path, \"ab\", buffering=0) as file:",
           "ownership/test_lease.py", "the log is opened before the owner is checked"),
    Mutant(OWNER, "update > began_at)", "update >= began_at)",
           "ownership/test_generation.py", "the checkpoint from which the next owner began is not late"),
    Mutant(OWNER, ", \"xb\").close()", ", \"wb\").close()",
           "ownership/test_generation.py", "two owners never have the same generation"),
    # The run
    Mutant(STOPPING, "torch.distributed.ReduceOp.MAX", "torch.distributed.ReduceOp.MIN",
           "launch/test_stop_requests.py", "a request to one process stops all of them"),
    Mutant(STOPPING, "saves > self.saves_done or self._save_is_pending", "saves > self.saves_done",
           "launch/test_stop_requests.py", "a save that is requested during an evaluation is made after it"),
    Mutant(STOPPING, "if self.saves_requested == self.saves_done:", "if True:",
           "launch/test_stop_requests.py", "one request at a time: one save"),
    Mutant(STOPPING, "self.reason = self.reason or recorded_stop_signal()", "self.reason = self.reason",
           "launch/test_stop_requests.py", "a signal during the imports is obeyed"),
    Mutant(STOPPING, "now - self.last_save > self.save_every_seconds", "now - self.last_poll > self.save_every_seconds",
           "launch/test_stop_requests.py", "the clock saves after so many seconds without a save"),
    Mutant(START, "    if result is not None and is_late(run, result):\n        return None\n", "",
           "run/test_finished.py", "a result that an earlier owner wrote late finishes no run"),
    Mutant(START, "if key in END_KEYS or affects_learning(key, config.schedule.name)]",
           "if affects_learning(key, config.schedule.name)]",
           "run/test_finished.py", "a finished run of fewer epochs is not what was asked for"),
    Mutant(RUN, "    return len(run.checkpoints.failures) + run.directory.failures", "    return run.directory.failures",
           "run/test_ending.py", "exit code 1: a finished run whose checkpoints failed"),
    Mutant(RUN, "    return len(run.checkpoints.failures) + run.directory.failures", "    return len(run.checkpoints.failures)",
           "run/test_ending.py", "exit code 1: a finished run whose records failed"),
    Mutant(RUN, "reason, metrics, _failed_writes(run))", "reason, metrics)",
           "run/test_ending.py", "exit code 1: an interrupted run whose records failed"),
    Mutant(RUN, "if checkpoints.last_saved != state.update:", "if checkpoints.last_saved is None:",
           "run/test_ending.py", "a run whose last checkpoint failed is not finished"),
    Mutant(NONFINITE, "            buffer.copy_(before)", "            pass",
           "run/test_guard.py", "a skipped update leaves BatchNorm's statistics as they were"),
    Mutant(NONFINITE, "            dist.all_reduce(values, dist.ReduceOp.MAX)", "            pass",
           "run/test_guard.py", "a loss of NaN on one process stops all of them"),
    Mutant(NONFINITE, "state.skipped_in_a_row >= MOST_IN_A_ROW", "False",
           "run/test_nonfinite.py", "a broken model is not skipped for ever"),
    Mutant("records/summary.py", ", \"--output-dir\", str(run)]", "]",
           "records/test_summary.py", "the command that resumes a run names its directory"),
    Mutant(RUN, "            self.meter.discard()", "            self.meter.commit()",
           "run/test_end_update.py", "a skipped update does not count in the training's metrics"),
    Mutant(RUN, "self.save_is_due and not ends_epoch", "self.save_is_due",
           "run/test_end_update.py", "at an epoch's end the checkpoint is saved after the evaluation"),
    Mutant(RUN, "evaluates or ends_epoch or state.update", "evaluates or state.update",
           "run/test_end_update.py", "an epoch's last samples are counted before it ends"),
    Mutant(RUN, "            state.epoch_left_out += covered - samples", "            pass",
           "run/test_end_update.py", "unreadable samples are counted as left out"),
    Mutant(RUN, "[MetricsLines(directory), Status(directory)]", "[Status(directory), MetricsLines(directory)]",
           "records/test_sinks.py", "metrics.jsonl has what anybody else is told", "the order is that of records/"),
    Mutant("run/observers.py", "(copy.deepcopy(event))", "(event)",
           "run/test_observers.py", "no observer sees what another one does to a value"),
    Mutant("run/observers.py", "            self._observers.remove(observer)\n", "",
           "run/test_observers.py", "an observer that failed is warned of once, and dropped"),
    Mutant(WATCHDOG, " or self._last_heard[rank][0] != progress.beat:", ":",
           "run/test_signs_of_life.py", "a living process is not called lost"),
    Mutant(WATCHDOG, "if self._has_updated else", "if not self._has_updated else",
           "run/test_signs_of_life.py", "until the first update another time limit counts"),
    Mutant(WATCHDOG, "self._store.compare_set(\"end\", \"\", announcement)", "self._store.compare_set(\"end\", self._store.get(\"end\") if self._store.check([\"end\"]) else \"\", announcement)",
           "run/test_signs_of_life.py", "the first reason for the end of a run is the one that all tell"),
    # The order of the data
    Mutant(PLAN, "return min(self.batch_size, self.samples - position)", "return self.batch_size",
           "data/test_order.py", "the mean gradient is over the samples that are really in the batch"),
    Mutant(PLAN, "    return slots // max(fitting)", "    return slots // min(fitting)",
           "data/test_order.py", "the largest micro-batch that fits is used"),
    Mutant(PLAN, "for units in divisors(share // unit)]", "for units in range(1, share // unit + 1)]",
           "data/test_order.py", "a batch is divided without a rest"),
    Mutant(SAMPLERS, "(self.filled[slots % plan.slots] & (positions < plan.samples))", "(self.filled[slots % plan.slots] & (positions <= plan.samples))",
           "data/test_order.py", "padding has weight 0"),
    Mutant(SAMPLERS, "(self.filled[slots % plan.slots] & (positions < plan.samples))", "(positions < plan.samples)",
           "data/test_order.py", "an empty slot has weight 0"),
    Mutant(SAMPLERS, "key(self.seed, self.epoch, \"order\")", "key(self.seed, \"order\")",
           "data/test_order.py", "each epoch has an order of its own"),
    Mutant(SAMPLERS, "weights[skipped], ids[skipped] = 0.0, self.substitute", "ids[skipped] = self.substitute",
           "data/test_order.py", "an unreadable sample becomes padding"),
    Mutant("data/order.py", "key(self.seed, epoch, \"shards\")", "key(self.seed, \"shards\")",
           "data/test_shards.py", "each epoch has an order of shards of its own"),
    Mutant("data/sources/staging.py", "else self.look_at(file.name) == file):", "else True):",
           "data/sources/test_staging.py", "a shard that changes while it is copied is refused"),
    Mutant("data/sources/staging.py", "if start + len(piece) > file.size:", "if False:",
           "data/sources/test_staging.py", "a body that is longer than announced ends the transfer"),
    Mutant(SAMPLERS, "self.ids if self.positions is None else self.positions)", "self.ids)",
           "data/test_drawing.py", "a sample that is drawn twice is augmented in two ways"),
    Mutant("data/order.py", "weights = 1 / labels.bincount().double()[labels]", "weights = 1 / labels.bincount().double()[labels].sqrt()",
           "data/test_drawing.py", "balanced: each class is drawn equally often"),
    # Transforms
    Mutant(PARAMETERS, "(draws[3 + axis] * self.size).floor() - (side", "(draws[3] * self.size).floor() - (side",
           "data/transforms/test_boxes.py", "CutMix: boxes are everywhere, not only on the diagonal"),
    Mutant(PARAMETERS, "side = (torch.sqrt(1 - share) * self.size).floor()", "side = ((1 - share) * self.size).floor()",
           "data/transforms/test_boxes.py", "CutMix: the box has the area 1 - lambda"),
    Mutant(PARAMETERS, "(draws[3 + axis] * self.size).floor() - (side / 2).floor()", "(draws[3 + axis] * (self.size - side)).floor()",
           "data/transforms/test_boxes.py", "CutMix: the centre of the box is uniform over the image"),
    Mutant(PARAMETERS, "torch.where(cuts, 1 - area / self.size**2, share)", "torch.where(cuts, cutmix_share, share)",
           "data/transforms/test_boxes.py", "CutMix: the label's share follows from the clipped box"),
    Mutant(PARAMETERS, "for quantiles in (self.cutmix_quantiles, self.mixup_quantiles)", "for quantiles in (self.mixup_quantiles, self.cutmix_quantiles)",
           "data/transforms/test_batch.py", "mixup's lambda has mixup's distribution"),
    Mutant(PARAMETERS, "betaincinv(alpha, alpha,", "betaincinv(alpha + 1, alpha,",
           "data/transforms/test_batch.py", "mixup's lambda is Beta(alpha, alpha)"),
    Mutant(PARAMETERS, "(draws[1] < SWITCH_PROBABILITY) if both", "(draws[0] < SWITCH_PROBABILITY) if both",
           "data/transforms/test_boxes.py", "mixup or CutMix is drawn apart from whether to mix"),
    Mutant(PARAMETERS, "(pairs[:, 0] > 0) & (pairs[:, 1] > 0)", "(pairs[:, 0] > 0)",
           "data/transforms/test_batch.py", "no sample is mixed with padding"),
    Mutant(PARAMETERS, "corners[axis].add_(draws[axis] < probability", "corners[axis].add_(draws[axis] < 0.5",
           "data/transforms/test_batch.py", "images are flipped with the probability that was asked for"),
    Mutant(PARAMETERS, "area = 0.02 + draws[1] * (0.33 - 0.02)", "area = 0.02 + draws[1] ** 2 * (0.33 - 0.02)",
           "data/transforms/test_boxes.py", "random erasing: the area is uniform from 2 to 33 %"),
    Mutant(PARAMETERS, "ratio = torch.exp((draws[2] * 2 - 1) * math.log(1 / 0.3))", "ratio = 0.3 + draws[2] * (1 / 0.3 - 0.3)",
           "data/transforms/test_boxes.py", "random erasing: tall boxes are as frequent as wide ones"),
    Mutant(PARAMETERS, "+ 2 * self.pad - size + 1  #", "+ 2 * self.pad - size  #",
           "data/transforms/test_batch.py", "a crop reaches every offset"),
    Mutant(BATCH, "own * share[:, None] + _swapped(own) * rest[:, None]", "own * rest[:, None] + _swapped(own) * share[:, None]",
           "data/transforms/test_mixing.py", "targets are mixed as the pixels are"),
    Mutant(IMAGE, "ratios = torch.exp(low + draws[3::2] * (high - low))", "ratios = ratio[0] + draws[3::2] * (ratio[1] - ratio[0])",
           "data/transforms/test_image.py", "RandomResizedCrop: the ratio is uniform in its logarithm"),
    # Figures
    Mutant(TASK, "    best[:, :1] = first\n", "",
           "test_task.py", "of equal logits the first class is the predicted one"),
    Mutant(TASK, "    first = logits.argmax(1, keepdim=True)", "    first = best[:, :1]",
           "test_task.py", "the tie of the highest class is broken as by argmax"),
    Mutant(TASK, "    predict = top5 if k == 5", "    predict = same if k == 5",
           "test_task.py", "top-5 accuracy counts five classes"),
    Mutant(TASK, "[2 * hit / (true + said) if", "[hit / true if",
           "test_task.py", "F1 counts wrong predictions"),
    Mutant(METRICS, "self.metrics[metric] if math.isfinite(self.metrics[\"loss\"]) else math.nan", "self.metrics[metric]",
           "records/test_metrics.py", "an evaluation with an infinite loss is never the best"),
    Mutant("records/meter.py", "(scores & real)", "scores",
           "records/test_meter.py", "padding is not counted in training"),
    Mutant(RECORDS, "            self.failures += 1", "            pass",
           "records/test_run_directory.py", "a record that cannot be written is counted"),
    Mutant(RECORDS, "content, durable=durable))", "content, durable=False))",
           "records/test_run_directory.py", "fsync: result.json survives a power failure"),
    Mutant(EVALUATE, "labels * classes + predictions,", "predictions * classes + labels,",
           "test_evaluate.py", "confusion: rows are true classes, columns predicted ones"),
    Mutant(EVALUATE, "    if not torch.equal(ids, torch.arange(pipeline.samples)):", "    if False:",
           "test_evaluate.py", "each sample is evaluated exactly once"),
    Mutant(EVALUATE, "    model.eval()\n", "",
           "test_evaluate.py", "the model is evaluated in evaluation mode"),
    Mutant(EVALUATE, "ids = torch.where(batch[\"weights\"] > 0, batch[\"ids\"], -1)", "ids = batch[\"ids\"]",
           "test_evaluate.py", "padding is not evaluated"),
    Mutant(EVALUATE, "of_samples[\"loss\"].isnan()", "of_samples[\"loss\"].isinf()",
           "test_evaluate.py", "outputs of NaN have no accuracy"),
    # Optimisation
    Mutant("step.py", "clip_grad_norm_(self.trained, self.config.optim.clip)", "clip_grad_norm_(self.trained, 1.0)",
           "integration/test_train.py", "gradients are clipped to the norm that was asked for",
           reason="an update of a whole run"),
    Mutant("optim/ema.py", "if updates - 1 > ema.copied", "if updates > ema.copied",
           "optim/test_schedules_of_others.py", "after the first update the EMA is the weights"),
    Mutant("optim/schedule.py", "milestone * epoch + 1 <= t + 1 for", "milestone * epoch <= t + 1 for",
           "optim/test_optim.py", "a milestone falls on the first update of its epoch"),
    Mutant("optim/schedule.py", "max(self.updates - begin, 2)", "max(self.updates, 2)",
           "optim/test_schedules_of_others.py", "cosine ends at the last update"),
    Mutant("optim/schedule.py", "elif self._digest(done := state_dict[\"updates\"]) != state_dict[\"factors\"]:", "elif (done := 0):",
           "optim/test_own_schedule.py", "a resume compares the factors of the updates that are done"),
    Mutant("optim/schedule.py", "if not (math.isfinite(number) and number >= 0):", "if not math.isfinite(number):",
           "optim/test_own_schedule.py", "no factor is negative"),
    Mutant("checkpoint/own_optimizer.py", "            _step(each, 2)", "            pass",
           "integration/test_own_optimizer.py", "a user's optimizer is refused if its state has not all that a step depends on",
           reason="they train under FSDP2, too"),
    Mutant("checkpoint/state_dict.py", "value.shape == shape and value.is_floating_point()", "value.is_floating_point()",
           "checkpoint/test_hostile.py", "a state of another shape does not come to a fused kernel"),
    Mutant("optim/loss.py", "reduction=\"none\", label_smoothing=loss.label_smoothing)", "reduction=\"none\")",
           "optim/test_optim.py", "cross entropy smooths the labels"),
    Mutant("optim/loss.py", "probabilities * (1 - smoothing) + smoothing / classes", "probabilities * (1 - smoothing) + smoothing / 2",
           "optim/test_loss.py", "binary cross entropy smooths as timm does"),
    Mutant("optim/loss.py", "target.to(losses) @ weights if mixed else weights[target]", "weights[target.argmax(1)] if mixed else weights[target]",
           "optim/test_optim.py", "mixed targets have the mean of their classes' weights"),
    Mutant("optim/optimizer.py", "filter_bias_and_bn=not optim.decay_all", "filter_bias_and_bn=False",
           "optim/test_optim.py", "biases and norms are not decayed"),
    # Sums and random numbers
    Mutant("exact_sum.py", "min(51, 53 - (terms - 1).bit_length())", "min(51, 54 - (terms - 1).bit_length())",
           "test_exact_sum.py", "the sum of all terms fits into float64"),
    Mutant("exact_sum.py", "<< 52) | (1 << 51))", "<< 52))",
           "test_exact_sum.py", "negative values are rounded to the grid, too"),
    Mutant("exact_sum.py", "exponents = _all_reduce(self._largest_exponents(), dist.ReduceOp.MAX)", "exponents = self._largest_exponents()",
           "test_exact_sum.py", "all processes round to the same grid"),
    Mutant("keyed.py", "return 8 if size >= SMALL else 24", "return 2",
           "test_keyed.py", "an order is random, in small data sets too"),
    # Models
    Mutant(VIRTUAL, "unbiased = variance * (count / (count - 1).clamp(min=1))", "unbiased = variance",
           "models/test_batchnorm.py", "running variances are unbiased"),
    Mutant(VIRTUAL, "summed, keepdim=True) / count.clamp(min=1)\n        enough", "summed, keepdim=True) / (count - 1).clamp(min=1)\n        enough",
           "models/test_batchnorm.py", "padding: values are normalised by the biased variance"),
    Mutant(VIRTUAL, "mean = (groups * weights).sum(", "mean = groups.sum(",
           "models/test_batchnorm.py", "padding does not count in BatchNorm"),
    Mutant(VIRTUAL, "enough = count >= 2", "enough = count >= 1",
           "models/test_batchnorm.py", "a single value has no variance"),
    Mutant("models/batchnorm_kernels.py", "alpha=(count - 1) / count)", "alpha=1.0)",
           "models/test_batchnorm_normalise.py", "on a GPU values are normalised by the biased variance"),
    Mutant(VIRTUAL, "self._momentum * (counts > 0)", "self._momentum",
           "models/test_batchnorm.py", "a BatchNorm that is not called keeps its statistics"),
    Mutant(VIRTUAL, "        self._forget_calls()\n        self._sums.zero_()", "        self._forget_calls()",
           "models/test_batchnorm.py", "a skipped update does not count in the running statistics"),
    Mutant(KEYS, "hashed(key(self.seed, \"dropout\", update), ids)", "hashed(key(self.seed, \"dropout\"), ids)",
           "models/test_dropout.py", "each update has masks of its own"),
    Mutant(KEYS, "ids) + self._words[:, None])", "ids) + 0 * self._words[:, None])",
           "models/test_dropout.py", "each layer has masks of its own"),
    Mutant(KEYS, "        keys = hashed(number, keys)", "        pass",
           "models/test_dropout.py", "each call of a layer has masks of its own"),
    Mutant(KEYS, "return 1 / self.kept if", "return 1 / (1 + self.kept) if",
           "models/test_dropout.py", "dropout keeps the expectation"),
    Mutant("models/classifier.py", "            module.eval()", "            pass",
           "models/test_freezing.py", "a frozen body's BatchNorm does not go on counting"),
    Mutant("models/classifier.py", "            parameter.grad = None", "            pass",
           "models/test_freezing.py", "what is frozen in the first epochs is not trained"),
    Mutant("models/classifier.py", "epoch < settings.freeze_epochs", "epoch <= settings.freeze_epochs",
           "models/test_freezing.py", "layers thaw after as many epochs as asked"),
    # Launch
    Mutant(AGREEMENT, "if its_facts[name] != expected:", "if False:",
           "launch/test_agreement.py", "processes with other options or data are refused"),
    Mutant(AGREEMENT, "characters with CRC {zlib.crc32(fact.encode()):08x}", "characters",
           "launch/test_agreement.py", "long facts of the same length are compared, too"),
    Mutant(AGREEMENT, "    if failed and len(failed) < len(found):", "    if False:",
           "launch/test_agreement.py", "an error on one process ends all of them"),
    Mutant(AGREEMENT, "    if isinstance(outcome[0], UserError):\n        raise outcome[0]\n", "",
           "launch/test_agreement.py", "an error of the main process is raised on all of them"),
    Mutant(ACCELERATOR, "os.environ.get(\"NVIDIA_TF32_OVERRIDE\") == \"0\"", "os.environ.get(\"NVIDIA_TF32_OVERRIDE\") == \"1\"",
           "launch/test_precision.py", "a run in TF32 says so"),
    # Export
    Mutant("tools/export.py", "\"std\": list(info.std),", "\"std\": list(info.mean),",
           "tools/test_preprocess.py", "an export has the run's normalisation constants"),
    Mutant("tools/export.py", "resize_default(size), \"crop\": size}]", "size, \"crop\": size}]",
           "tools/test_preprocess.py", "an export resizes as the evaluation does"),
    Mutant("tools/export.py", "if not difference <= LARGEST_DIFFERENCE:", "if difference > LARGEST_DIFFERENCE:",
           "tools/test_export_compare.py", "an export that gives NaN is not called equal"),
    Mutant("tools/export.py", "all_and_one = inputs, inputs[:1]", "all_and_one = (inputs,)",
           "tools/test_export_compare.py", "an export is compared with a batch of one, too"),
    # Configuration
    Mutant(OPTIONS, "            mistakes.append(unknown_option(option.key, option.origin, known))", "            pass",
           "config/test_options.py", "an unknown key of a recipe is refused"),
    Mutant(OPTIONS, "    options = {**recipe.options, **given}", "    options = {**given, **recipe.options}",
           "config/test_options.py", "the command line wins over the recipe"),
    Mutant("config/schema.py", "become longer\", unless=ENDING", "become longer\", unless=(\"cosine\",)",
           "config/test_compatibility.py", "more epochs are another schedule for poly"),
    Mutant("config/schema.py", "    augment: Augment = ", "    augment: Annotated[Augment, ONE_START] = ",
           "config/test_compatibility.py", "a change of the augmentation is refused when a run is resumed"),
    Mutant("config/schema.py", "\"balanced\"], DECIDES_SAMPLES]", "\"balanced\"]]",
           "checkpoint/test_resume.py", "the samples of an epoch do not change in its middle",
           "only a checkpoint is in the middle of an epoch"),
    Mutant("config/compatibility.py", "    if number != FORMAT:", "    if False:",
           "checkpoint/test_versions.py", "a run of another version is not misread", "only a run has files of a format"),
    Mutant("config/declaration.py", "lambda x: 0 <= x <= 1)", "lambda x: 0 <= x)",
           "config/test_options.py", "a probability is at most 1"),
    # A loop of one's own
    Mutant("parts.py", "    if has_batchnorm(model):", "    if False:",
           "test_parts.py", "a BatchNorm that depends on the number of processes is refused"),
    Mutant("parts.py", "        broadcast_from_main(self.accelerator, self.lease.check)\n", "",
           "test_parts.py", "who has lost the directory is told so at the next save"),
    Mutant("parts.py", "in pairs.items() if old != new]", "in pairs.items() if False]",
           "test_parts.py", "other settings do not go on from a checkpoint"),
    Mutant("parts.py", "    if not accelerator.split_batches:", "    if False:",
           "test_parts.py", "each process gets its slice of a batch, not a whole batch"),
    # Jobs
    Mutant("tools/cluster/submission.py", "if each[1] in WAITING)", "if each[1])",
           "cluster/test_elements.py", "a job that has not ended counts, whatever came after it",
           "tests/cluster has everything about jobs"),
    Mutant("tools/cluster/submission.py", "plain if plain == text else", "plain if True else",
           "cluster/test_elements.py", "values that look alike are different runs",
           "tests/cluster has everything about jobs"),
]  # fmt: skip


def place_of(mutant: Mutant) -> str:
    line = (ROOT / "accel_train" / mutant.file).read_text().split(mutant.before)[0].count("\n") + 1
    return f"{mutant.file}:{line}"


def apply(mutant: Mutant, root: Path) -> None:
    """Change the line in the copy of the program at `root`. Raises ValueError unless its fragment is there once."""
    path = root / "accel_train" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.before)} times, not once: {mutant.before}")
    path.write_text(text.replace(mutant.before, mutant.after))


def run_tests(tests: Sequence[str], mutant: Mutant | None = None) -> tuple[int | None, str]:
    """Run test files on a copy of the program, up to the first failure. Returns pytest's exit code (None: it took too
    long), and the test that failed or else the end of the output."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in COPIED:  # without compiled files, which a change of the same length in the same second could hide
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder)
        if mutant is not None:
            apply(mutant, Path(folder))
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-o", "addopts=--strict-markers -rfE"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, f"no result within {LIMIT_SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", output, re.MULTILINE)
    return process.returncode, failed[1] if failed else output[-2000:]


def judge(mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant is noticed by a test, and a line that says so."""
    began = time.monotonic()
    what = f"{place_of(mutant)}: {mutant.promise}"
    try:
        code, text = run_tests(mutant.tests.split(), mutant)
    except ValueError as error:
        return False, f"FRAGMENT NOT FOUND  {error}"
    if code == 1:
        return True, f"killed by {text} in {time.monotonic() - began:.0f} s  {what}"
    return False, f"SURVIVED  {what}" if code == 0 else f"NO ANSWER  {what}: pytest ended with {code}: {text}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="WORD", default="", help="only mutants whose file, lines or promise have WORD"
    )
    parser.add_argument("--jobs", type=int, default=1, help="so many at the same time")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in "\n".join(mutant)]
    tests = sorted({test for mutant in chosen for test in mutant.tests.split()})
    code, text = run_tests(tests)
    if code != 0:
        print(f"The tests fail without any change (pytest ended with {code}): {text}")
        return 1
    alive = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for noticed, line in pool.map(judge, chosen):
            alive += not noticed
            print(line, flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants were noticed")
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
