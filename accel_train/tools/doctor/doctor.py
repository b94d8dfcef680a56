"""The doctor: checks before a long run, of `accel-train doctor` and of the start of a training itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.launch.agreement import broadcast_from_main
from accel_train.launch.environment import Launch
from accel_train.optim.performance import is_out_of_memory, training_advice
from accel_train.records.cost import duration
from accel_train.tools.bench import Workload
from accel_train.tools.doctor import job, node, storage
from accel_train.tools.doctor.check import FAIL, NA, PASS, Check, Examination, Finding, failure, judged
from accel_train.training_setup import TrainingSetup, connect

ENOUGH_UPDATES, SECONDS = 3, 3.0  # of a measurement: so many updates, and as many as take so long


def update(exam: Examination) -> Finding:
    """One update fits into memory; the time that an update, an epoch and all take, without evaluations."""
    if exam.splits is None:
        return Finding(NA, "the data could not be loaded")
    expected = "a forward, a backward pass and a step fit into memory"
    exam.workload = workload = Workload(exam.config, exam.launch, exam.splits)
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
    found = f"{seconds * 1000:.3g} ms an update, {exam.config.batch_size / seconds:,.0f} images/s; "
    found += f"{duration(epoch)} an epoch, {duration(total)} for all, without evaluations; {plan.division}"
    return Finding(PASS, found, expected)


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
    advice = "More cores a process (--cpus-per-task), or decode less: accel-train shards --encoding raw."
    expected = "the input is faster than the model, so that the device never waits"
    return judged(alone >= model, f"input {alone:,.0f} images/s, model {model:,.0f}", expected, advice)


CONNECTED: dict[str, Check] = {  # need no data; cheap ones first: they explain why a later one fails
    "versions": job.versions,
    "variables": job.variables,
    "clocks": job.clocks,
    "cores": node.cores,
    "memory": node.memory,
    "shared-memory": node.shared_memory,
    "gpu-health": node.gpu_health,
    "matmul": node.matmul,
    "all-reduce": node.all_reduce,
    "slowest-pair": node.slowest_pair,
}
LOADED: dict[str, Check] = {"data-contents": storage.data_contents, "reading": storage.reading}
CREATED: dict[str, Check] = {  # need the size of a checkpoint
    "room": storage.room,
    "save": storage.save,
    "signal": job.signal_of_job,
}
MEASURED: dict[str, Check] = {"update": update, "input": input_speed}  # the training itself shows these
CHECKS: dict[str, Check] = CONNECTED | LOADED | MEASURED | CREATED | {"time-left": job.time_left}
START_SECONDS = 5.0  # of the checks in a training's start


@dataclass(frozen=True)
class Diagnosis:
    """What the checks have found, the same on all processes."""

    findings: Mapping[str, Finding]
    """By the name of the check."""
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [name for name, finding in self.findings.items() if finding.status == FAIL]


def doctor(launch: Launch, config: Config) -> Diagnosis:
    """Make all checks. Collective. Raises UserError if the processes cannot connect."""
    began = time.monotonic()
    exam = Examination(config, launch, connect(config, launch))
    found = {name: _examined(exam, check) for name, check in CHECKS.items()}
    return Diagnosis(found, time.monotonic() - began)


@dataclass
class StartDoctor:
    """The checks in the start of a training: those that need no more than it has, for some seconds."""

    report: Callable[[Diagnosis, bool], None]
    """Gets what each of the two rounds has found, with the time of both, and whether it was the last one."""
    seconds: float = field(default=0.0, init=False)

    def __call__(self, config: Config, launch: Launch, accelerator: Accelerator) -> Callable[[TrainingSetup], None]:
        """Check the processes, which are connected; return the function that checks the rest. Collective."""
        exam = Examination(config, launch, accelerator)
        self._make(exam, CONNECTED, is_last=False)

        def finish_preflight(setup: TrainingSetup) -> None:
            exam.setup, exam.splits = setup, setup.splits
            self._make(exam, LOADED | CREATED, is_last=True)

        return finish_preflight

    def _make(self, exam: Examination, checks: Mapping[str, Check], *, is_last: bool) -> None:
        began, found = time.monotonic() - self.seconds, {}
        late = Finding(NA, f"the checks before it took more than {START_SECONDS:.0f} s")
        for name, check in checks.items():
            is_late = broadcast_from_main(exam.accelerator, lambda: time.monotonic() - began > START_SECONDS)
            found[name] = late if is_late else _examined(exam, check)
        clear_device_cache()  # the training needs the memory
        self.seconds = time.monotonic() - began
        self.report(Diagnosis(found, self.seconds), is_last)


def _examined(exam: Examination, check: Check) -> Finding:
    try:
        return check(exam)
    except (UserError, RuntimeError) as error:  # a collective that failed has failed on every rank
        return failure(error)
