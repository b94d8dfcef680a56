"""The run: does an update fit, how fast is it, what will all take, and does the model wait for its input?"""

from __future__ import annotations

import math

from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.optim.performance import is_out_of_memory, training_advice
from accel_train.records.cost import duration
from accel_train.tools.doctor.check import FAIL, NA, PASS, Examination, Finding, judged
from accel_train.tools.workload import Workload

ENOUGH_UPDATES, SECONDS = 3, 3.0  # of a measurement: so many updates, and as many as take so long
EVEN = 10  # numbers of processes that are named


def update(exam: Examination) -> Finding:
    """One update fits into memory; the time that an update, an epoch and all take, without evaluations."""
    if exam.splits is None:
        return Finding(NA, "the data could not be loaded")
    expected = "a forward, a backward pass and a step fit into memory"
    try:
        exam.workload = workload = Workload(exam.config, exam.launch, exam.splits)
    except UserError as error:
        return Finding(FAIL, str(error), expected, "Mend the recipe; see accel-train train --help.")
    exam.setup, plan = workload.setup, workload.plan
    # Asked before the first update: its sums would wait for a rank that has no memory.
    if full := [rank for rank, fits in enumerate(exam.gather(_fits(workload))) if not fits]:
        exam.workload = None
        return Finding(FAIL, f"{exam.names(full)}: out of memory", expected, training_advice(plan))
    first = workload.bare_seconds(1, warm_up=2)
    enough = min(max(ENOUGH_UPDATES, math.ceil(SECONDS / max(first, 1e-6))), plan.updates_per_epoch)
    count = broadcast_from_main(exam.accelerator, lambda: enough)
    seconds = max(exam.gather(workload.bare_seconds(count, warm_up=0) / count))
    epoch, total = seconds * plan.updates_per_epoch, seconds * plan.updates
    exam.measured |= {"update_seconds": seconds, "training_seconds": total}
    numbers = plan.even_processes
    even = ", ".join(map(str, numbers[:EVEN])) + (", …" if len(numbers) > EVEN else "")
    found = f"{seconds * 1000:.3g} ms an update, {exam.config.batch_size / seconds:,.0f} images/s; "
    found += f"{duration(epoch)} an epoch, {duration(total)} for all, without evaluations; "
    return Finding(PASS, f"{found}{plan.division}, shared evenly by {even} processes", expected)


def _fits(workload: Workload) -> bool:
    try:
        workload.backward_alone()
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False


def input_speed(exam: Examination) -> Finding:
    """The input alone is faster than the model."""
    workload = exam.workload
    if workload is None:
        return Finding(NA, "there is no update")
    seconds = exam.measured["update_seconds"]
    count = max(1, min(workload.plan.updates_per_epoch, math.ceil(2.0 / seconds)))
    alone = exam.config.batch_size * count / max(exam.gather(workload.input_seconds(count, warm_up=1)))
    model = exam.config.batch_size / seconds
    if alone < model:
        exam.measured["training_seconds"] *= model / alone
    advice = "Give each process more cores (--cpus-per-task)."
    if not workload.setup.splits.train.in_memory:
        advice += " Or decode less: accel-train shards --encoding raw, --data.reduced-decode true."
    expected = "the input is faster than the model, so that the device never waits"
    return judged(alone >= model, f"input {alone:,.0f} images/s, model {model:,.0f}", expected, advice)
