"""What the whole training will take."""

from __future__ import annotations

import math

from accel_train.data.order.plan import NO_END
from accel_train.doctor.check import NOT_CHECKED, PASS, Check, Examination, Finding
from accel_train.doctor.scheduler import job_times
from accel_train.launch.agreement import broadcast_from_main
from accel_train.records.cost.summary import duration


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


CHECKS = (Check("forecast", forecast),)
