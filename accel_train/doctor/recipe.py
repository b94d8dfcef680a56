"""The recipe on this machine: does an update fit, how fast is it, does it wait for its data, and what will all take?"""

from __future__ import annotations

import math

import psutil
import torch

from accel_train.bench.workload import Clock, Workload
from accel_train.data.loading import evaluation_batch_size
from accel_train.data.order.plan import NO_END
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, Check, Examination, Finding, judged
from accel_train.doctor.scheduler import job_times
from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.optim.performance import LESS_MEMORY, is_out_of_memory, training_advice
from accel_train.records.cost import duration

ENOUGH_UPDATES, SECONDS = 3, 3.0  # of a measurement: so many updates, and as many as take so long
EVEN = 10  # numbers of processes that are named


def update(exam: Examination) -> Finding:
    """One update fits into memory; the time that an update takes."""
    if exam.splits is None:
        return Finding(NOT_CHECKED, "the data could not be loaded")
    device, expected = exam.accelerator.device, "a forward, a backward pass and a step fit into memory"
    _reset_peak(device)
    try:
        workload = Workload(exam.config, exam.launch, exam.splits)
        # Asked before the first update: its sums would wait for a rank that has no memory.
        if full := [rank for rank, fits in enumerate(exam.gather(_fits(workload))) if not fits]:
            return Finding(FAIL, f"{exam.names(full)}: out of memory", expected, training_advice(workload.plan))
        exam.workload = workload
        first = workload.bare_seconds(1, warm_up=2)
        enough = max(ENOUGH_UPDATES, math.ceil((0.5 if exam.quick else SECONDS) / max(first, 1e-6)))
        count = exam.agreed(min(enough, workload.plan.updates_per_epoch))
        seconds = workload.bare_seconds(count, warm_up=0)
    except UserError as error:
        return Finding(FAIL, str(error), expected, "Mend the recipe; see accel-train train --help.")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        exam.workload = None
        return Finding(FAIL, "out of memory", expected, f"Make it smaller: {LESS_MEMORY}")
    exam.measured["update_seconds"] = exam.slowest(seconds / count)
    setup = workload.setup
    tensors = [*setup.model.state_dict().values(), *([] if setup.ema is None else setup.ema.state_dict().values())]
    tensors += [v for state in setup.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    exam.measured["checkpoint_bytes"] = float(sum(tensor.nbytes for tensor in tensors))
    took, plan = exam.measured["update_seconds"], workload.plan
    found = f"{took * 1000:.3g} ms an update, {exam.config.batch_size / took:,.0f} images/s"
    numbers = plan.even_processes
    even = ", ".join(map(str, numbers[:EVEN])) + ", …" * (len(numbers) > EVEN)
    found += f"; {plan.division}, shared evenly by {even} processes; {_left(exam, device)}"
    return Finding(PASS, found, expected)


def _reset_peak(device: torch.device) -> None:
    """Reset the peak of tensors' memory on `device`, if torch counts it."""
    if hasattr(module := torch.get_device_module(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int | None:
    """Return the peak of tensors' memory on `device` in bytes, or None if torch does not count it."""
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else None


def _fits(workload: Workload) -> bool:
    try:
        workload.backward_alone()
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False


def _left(exam: Examination, device: torch.device) -> str:
    peak = _peak_bytes(device)
    if peak is None or device.type == "cpu":
        return f"{psutil.virtual_memory().available / 2**30:.1f} GiB of the host's memory are free"
    total = torch.get_device_module(device).get_device_properties(device).total_memory
    return f"{max(exam.gather(peak)) / 2**30:.1f} of {total / 2**30:.1f} GiB of the device"


def evaluation(exam: Examination) -> Finding:
    """One batch of evaluation fits into memory; the time that it takes."""
    workload = exam.workload
    if workload is None:
        return Finding(NOT_CHECKED, "there is no update")
    setup, expected = workload.setup, "a batch of evaluation fits into memory"
    pipeline = next(iter(setup.evaluations.values()), None)
    if pipeline is None:
        return Finding(NOT_CHECKED, "the data has neither a validation nor a test split")
    clock = Clock(setup.device, exam.accelerator.wait_for_everyone)
    try:
        setup.model.eval()
        with torch.inference_mode(), exam.accelerator.autocast():
            clock.start()
            inputs, _ = pipeline.transform(next(iter(pipeline.batches)))
            setup.model(inputs)
            seconds = clock.stop()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        size = evaluation_batch_size(exam.config, pipeline.samples, setup.evaluation_batch)
        return Finding(FAIL, f"out of memory with {size} images", expected, f"--eval-batch-size {max(1, size // 4)}")
    batches = pipeline.samples / (len(inputs) * len(exam.hosts))
    exam.measured["evaluation_seconds"] = exam.slowest(seconds) * batches
    found = f"{len(inputs)} images of each rank in {seconds:.2g} s, the start of loading included"
    return Finding(PASS, found, expected)


def input_speed(exam: Examination) -> Finding:
    """The input alone is faster than the model."""
    workload = exam.workload
    if workload is None:
        return Finding(NOT_CHECKED, "there is no update")
    most = min(workload.plan.updates_per_epoch, math.ceil(2.0 / exam.measured["update_seconds"]))
    count = exam.agreed(max(1, most))
    images = exam.config.batch_size * count
    alone = images / exam.slowest(workload.input_seconds(count, warm_up=1))
    model = exam.config.batch_size / exam.measured["update_seconds"]
    exam.measured["input_images_per_second"] = alone
    found = f"input {alone:,.0f} images/s, model {model:,.0f}"
    expected = "the input is faster than the model, so that the device never waits"
    advice = "Give each process more cores (--cpus-per-task)."
    if exam.splits is not None and not exam.splits.train.in_memory:
        advice += " Or decode less: accel-train shards --encoding raw, --data.reduced-decode true."
    return judged(alone >= model, found, expected, advice)


def forecast(exam: Examination) -> Finding:
    """The time of an epoch and of all, the devices' hours, and the disk."""
    measured = exam.measured
    if exam.workload is None or "update_seconds" not in measured:
        return Finding(NOT_CHECKED, "an update was not measured")
    plan, config = exam.workload.plan, exam.config
    images = config.batch_size / measured["update_seconds"]
    images = min(images, measured.get("input_images_per_second", images))
    epoch = plan.samples_per_epoch / images
    epochs = plan.updates / plan.updates_per_epoch
    evaluations = epochs // config.eval_every_epochs + 1 + plan.updates // (config.eval_every_updates or NO_END)
    total = epoch * epochs + measured.get("evaluation_seconds", 0.0) * evaluations
    measured["training_seconds"] = total
    kind = "GPU" if exam.accelerator.device.type == "cuda" else "process"
    disk = measured.get("checkpoint_bytes", 0.0) * (config.checkpoint.keep + 2) / 2**20
    found = f"{duration(epoch)} an epoch, {duration(total)} for {epochs:g}, evaluations included"
    found += f"; {total * plan.processes / 3600:.2g} {kind}-hours; {disk:,.0f} MiB of checkpoints"
    start, end = broadcast_from_main(exam.accelerator, job_times)
    if start is not None and end is not None and end > start:
        requeues = math.ceil(total / (end - start)) - 1
        found += f"; {max(0, requeues)} requeues at this time limit"
    return Finding(PASS, found, "for your information")


CHECKS = (
    Check("update", update, seconds=15),
    Check("evaluation", evaluation, seconds=5),
    Check("input", input_speed, seconds=8),
)
FORECAST = Check("forecast", forecast)
