"""Jobs of a cluster: `accel-train submit` queues them, `after-job` decides what follows each. No torch is imported."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.config.declaration import RECIPE_WORD, Word
from accel_train.config.options import CommandOptions, given_keys, parse_command
from accel_train.errors import UserError, counted, first_of, how_to_get, one_line, print_line
from accel_train.files import open_to_write, read_json_object, read_regular_file, read_stripped
from accel_train.launch.environment import allocated_hosts
from accel_train.launch.process import CODE, ENDED, MARKER, NODES, RUN, job_id, start_folder
from accel_train.tools.cluster.scheduler import SCHEDULERS, Job, Pbs, Slurm
from accel_train.tools.cluster.submission import Element, elements_of, jobs_to_queue, plan, queue, words_of_element


@dataclass(frozen=True)
class Submit(CommandOptions):
    """Submit a recipe to Slurm or PBS: a job, or with --seeds and --over an array with a run for each combination.

    Options of train (--epochs, --data.root, …) change the recipe of all, and words after -- are options of sbatch or
    qsub: accel-train submit digits --seeds 0-4 --over optim.lr=0.1,0.01 -- --time=1:00:00 --gpus-per-node=1. All
    options are checked before anything is queued. The same command again queues what has neither finished nor is in
    the queue. Each element is requeued by itself (docs/clusters.md). Your own copy of the job script is the last word.
    """

    TRAIN_OPTIONS = ("",)

    recipe: Annotated[str, RECIPE_WORD]
    """A recipe, or a YAML file."""
    seeds: str | None = None
    """The seeds: 0-4, or 1,2,7-9; default: the recipe's."""
    over: tuple[str, ...] = ()
    """Settings to vary, each KEY=VALUE,VALUE,…; of several all combinations. A comma in a value is written \\, and
    nodes=1,2,4 is the same run on so many nodes."""
    output_dir: Path | None = None
    """Folder of the runs; default: runs/RECIPE/submit-HASH, the same for the same command."""
    scheduler: Literal["slurm", "pbs"] | None = None
    """Default: Slurm where sbatch is installed, else PBS."""
    print: bool = False
    """Show the runs, the command and the job script; write and queue nothing."""


def submit(arguments: Sequence[str]) -> int:
    """Run `accel-train submit`; return the exit code."""
    words, for_scheduler = divide(arguments)
    options, rest = parse_command(Submit, words)
    if (count := given_keys(words).count("over")) > 1 or (count and not options.over):
        raise UserError("--over: expected all settings after one --over, such as --over optim.lr=0.1,0.01 epochs=2,4.")
    given = given_keys(rest)
    if not_of_a_run := [f"--{key}" for key in ("config-only", "take-over") if key in given]:
        raise UserError(f"{', '.join(not_of_a_run)}: an option of one start, not of submitted runs; leave it out.")
    scheduler = _scheduler(options.scheduler)
    for word in for_scheduler:
        if scheduler.reserved.match(word):
            raise UserError(f"{word}: accel-train submit sets this option of {scheduler.program} itself; leave it out.")
    own = for_scheduler[-1:] if for_scheduler and Path(for_scheduler[-1]).is_file() else []
    for_scheduler = for_scheduler[: len(for_scheduler) - len(own)]
    script = Path(*own or [scheduler.script]).absolute()
    if not script.is_file():
        raise UserError(
            f"no {script}: run accel-train submit in the folder that has slurm/ and pbs/, or name your own job script "
            f"last, after --.{how_to_get(scheduler.script)}"
        )
    elements = elements_of(options.recipe, rest, options.seeds, options.over)
    folder = (options.output_dir.expanduser() if options.output_dir else _default_folder(elements)).absolute()
    if options.print:
        _print(folder, elements, scheduler, script, for_scheduler)
        return 0
    todo, numbers = queue(folder, elements, scheduler, script, for_scheduler)
    if todo.finished:
        print_line(f"finished already: {first_of(todo.finished)}")
    if todo.waiting:
        print_line(f"in the queue already: {first_of(todo.waiting)}")
    count = len(todo.missing)
    queued = f"{counted(count, 'run')} queued as {', '.join(numbers)}" if count else "nothing to queue"
    print_line(f"{queued}: accel-train runs {shlex.quote(str(folder))}; logs: {folder}/jobs")
    return 0


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (options of this command and of train, options of the scheduler)."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end]], [*arguments[end + 1 :]]


def _scheduler(name: str | None) -> Slurm | Pbs:
    for scheduler in SCHEDULERS:
        if name in (None, scheduler.name) and shutil.which(scheduler.program):
            return scheduler
    wanted = " or ".join(each.program for each in SCHEDULERS if name in (None, each.name))
    raise UserError(f"no program {wanted} here: submit on a login node of the cluster, or load its module.")


def _default_folder(elements: Sequence[Element]) -> Path:
    digest = hashlib.sha256("\0".join(element.recipe for element in elements).encode(errors="surrogateescape"))
    return Path("runs") / elements[0].config.recipe / f"submit-{digest.hexdigest()[:8]}"


def _print(folder: Path, elements: Sequence[Element], scheduler: Slurm | Pbs, script: Path, options: list[str]) -> None:
    todo = plan(folder, elements)
    print_line(f"# {len(todo.missing)} of {len(elements)} runs would be queued, in {folder}")
    for element in todo.missing:
        print_line(f"#   {element.name:<30} {shlex.join(element.options)}")
    for _, _, words in jobs_to_queue(folder, todo.missing, scheduler, script, options):
        print_line(shlex.join(words))
    print_line(f"# {script}:")
    for line in read_regular_file(script, follow=True).decode(errors="replace").splitlines():
        print_line(line)


REQUEUES = "requeues"
"""A file in RUN/slurm with the update of each stop after which the job script has started the run again."""
VARIABLES = ("ACCELERATE_CONFIG", "PROCESSES_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "MAX_REQUEUES", "DOCTOR",
             "LEAD_SECONDS")  # fmt: skip
"""Those of the job scripts that a user may set (docs/clusters.md); no other's value is printed, which may be secret."""
KILLED = 143  # the exit code of a job that the batch system has ended


@dataclass(frozen=True)
class AfterJob(CommandOptions):
    """Decide what a job script does after its training; slurm/*.sbatch and pbs/train.pbs call it.

    accel-train after-job CODE -- RECIPE [--key value …], with the exit code of srun and the words of the training. It
    prints one line for the script: requeue, or resubmit with the words of qsub, or end with an exit code. On stderr it
    says why, and how a person continues the run. The script's variable ACCEL_TRAIN_START names the folder in which the
    training has left its own exit code, the file REQUEUE and the nodes that it has reached.
    """

    code: Annotated[int, Word("CODE")]
    """The exit code of the program that the job script has started."""


def after_job(arguments: Sequence[str]) -> int:
    """Run `accel-train after-job`; return the exit code."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, _ = parse_command(AfterJob, arguments[:end])
    start = start_folder()
    if start is None:
        raise UserError("accel-train after-job: ACCEL_TRAIN_START is not set; the job scripts set it.")
    print_line(_After(start, [*arguments[end + 1 :]]).decide(options.code))
    return 0


class _After:
    """A job whose training has ended."""

    def __init__(self, start: Path, words: list[str]) -> None:
        self.start = start
        self.scheduler = Pbs() if "PBS_JOBID" in os.environ else Slurm()
        self.job: Job = self.scheduler.job(job_id(), words, os.environ)
        if words and words[0].endswith(".jsonl"):
            words = words_of_element(Path(words[0]), start.parent.name)
        self.words = words

    def decide(self, code: int) -> str:
        """Return the line for the script, and say on stderr what it means."""
        own, update = read_stripped(self.start / CODE), read_stripped(self.start / MARKER)
        code = int(own) if own.isdigit() else code
        if (self.start / ENDED).exists():
            _say(
                "the batch system has ended this job. After a preemption or a lost node it starts it again by itself, "
                f"after scancel or qdel it does not: then {self._again()}"
            )
            return f"end {KILLED}"
        if not update:
            self._explain(code)
            if code == 0:
                shutil.rmtree(self.start.parent, ignore_errors=True)  # also of starts that were lost
            return f"end {code}"
        given = os.environ.get("MAX_REQUEUES", "")
        stops, most = self._count_stops(update), int(given) if given.isdigit() else 3
        if stops > most:
            _say(
                f"error: stopped {counted(stops, 'time')} in a row at update {update}, without progress: not "
                f"started again. Give the job more time ({self.scheduler.more_time}), or find out why an update takes "
                f"so long. Then: {self._again()}"
            )
            return "end 1"
        if not self.job.may_requeue:
            _say(f"error: saved at update {update}, but this job may not be requeued. To continue: {self._again()}")
            return "end 1"
        if isinstance(self.scheduler, Slurm):
            _say(f"interrupted and saved at update {update}: requeueing")
            return "requeue"
        _say(f"interrupted and saved at update {update}: submitting again. If that fails: {self._again()}")
        return shlex.join(["resubmit", " ".join(self.job.variables), *self.job.options])

    @property
    def run(self) -> Path | None:
        """The run that this start has owned, or that it was refused; None if it has not begun."""
        if owned := read_stripped(self.start / RUN):
            return Path(owned)
        for before, word in zip(["", *self.words], self.words, strict=False):
            if before == "--output-dir" or word.startswith("--output-dir="):
                return Path(word.removeprefix("--output-dir=")).absolute()
        recipe = Path(self.words[0]).stem if self.words else ""
        return Path("runs", recipe, f"job-{self.start.parent.name}").absolute()

    def _count_stops(self, update: str) -> int:
        """Note the stop at this update; return how many of the latest stops in a row were at it."""
        if self.run is None:
            return 1
        path = self.run / "slurm" / REQUEUES
        found = [*read_stripped(path).split(), update]
        try:
            path.parent.mkdir(exist_ok=True)
            with open_to_write(path, "ab") as file:
                file.write(f"{update}\n".encode())
        except OSError as error:
            _say(f"warning: {path} cannot be written ({error}): stops without progress are not counted")
        return next((i for i, other in enumerate(reversed(found)) if other != update), len(found))

    def _explain(self, code: int) -> None:
        """Say what is known of a start that asks for nothing."""
        reached = {path.name for path in (self.start / NODES).glob("*")}
        if absent := [node for node in allocated_hosts(os.environ) if node not in reached]:
            _say(
                f"no task could write to {self.start} on {', '.join(absent)}: are these nodes up, and can they see it?"
            )
        if code == 0:
            return
        if code != 2:
            todo = f"To continue the run: {self._again()}"
        elif self.run is not None and (self.run / "config.yaml").is_file():
            todo = "Correct what it says. To continue the run with the settings that it had before: "
            todo += self._again([f"{self.run}/config.yaml"])
        else:  # once refused, the same words would be refused again
            todo = "Correct what it says and submit the job again: no run has begun that could be continued."
        reason = {} if self.run is None else read_json_object(self.run / "status.json")
        said = reason.get("reason") if reason.get("state") == "failed" else None
        why = f": {one_line(said, 300).rstrip('.')}." if isinstance(said, str) else ". Look for the first error above."
        _say(f"failed with exit code {code}{why} {todo}")

    def _again(self, words: Sequence[str] | None = None) -> str:
        """Return what a person types to continue the run, in this folder's shell, as a job like this one."""
        words = [*(self.words if words is None else words)]
        given = any(word == "--output-dir" or word.startswith("--output-dir=") for word in words)
        words += [] if given or self.run is None else ["--output-dir", str(self.run)]
        known = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
        if known.get("DOCTOR") == "print":  # its default
            del known["DOCTOR"]
        return f"cd {shlex.quote(str(Path.cwd()))} && {self.scheduler.again(self.job, words, known)}"


def _say(text: str) -> None:
    print_line(f"[{time.strftime('%H:%M:%S')}] after-job: {text}", sys.stderr)
