"""`accel-train submit`."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accel_train.config.declaration import RECIPE
from accel_train.config.options import CommandOptions, parse_command
from accel_train.errors import UserError, counted, first_of, how_to_get, print_line
from accel_train.tools.cluster.elements import Element, elements_of
from accel_train.tools.cluster.scheduler import SCHEDULERS, Pbs, Slurm
from accel_train.tools.cluster.submission import jobs_to_queue, plan, queue
from accel_train.untrusted import read_regular_file


@dataclass(frozen=True)
class Submit(CommandOptions):
    """Submit a recipe to Slurm or PBS: a job, or with --seeds and --over an array with a run for each combination.

    Options of train (--epochs, --data.root, …) change the recipe of all, and words after -- are options of sbatch or
    qsub: accel-train submit digits --seeds 0-4 --over optim.lr=0.1,0.01 -- --time=1:00:00 --gpus-per-node=1. All
    options are checked before anything is queued. The same command again queues what has neither finished nor is in
    the queue. Each element is requeued by itself (docs/clusters.md). Your own copy of the job script is the last word.
    """

    TRAIN_OPTIONS = ("",)

    recipe: Annotated[str, RECIPE]
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
    given = {word.partition("=")[0].removeprefix("--") for word in rest}
    if not_of_a_run := [f"--{key}" for key in ("config-only", "take-over", "traceback") if key in given]:
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
    print_line(f"{queued}: accel-train runs {shlex.quote(str(folder))}")
    return 0


def divide(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (options of this command and of train, options of the scheduler). Repeated --over become one."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words: list[str] = []
    over: list[str] = []
    in_over = False
    for word in arguments[:end]:
        if word.startswith("-"):
            in_over = word == "--over"
        if word.startswith("--over="):
            over.append(word.removeprefix("--over="))
        elif not in_over:
            words.append(word)
        elif word != "--over":
            over.append(word)
    if "--over" in arguments[:end]:
        over = over or [""]  # which is refused
    return [*words, *(["--over", *over] if over else [])], [*arguments[end + 1 :]]


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
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--print | head` ends quietly
    todo = plan(folder, elements)
    print_line(f"# {len(todo.missing)} of {len(elements)} runs would be queued, in {folder}")
    for element in todo.missing:
        print_line(f"#   {element.name:<30} {shlex.join(element.options)}", wraps=False)
    for _, _, words in jobs_to_queue(folder, todo.missing, scheduler, script, options):
        print_line(shlex.join(words), wraps=False)
    print_line(f"# {script}:")
    for line in read_regular_file(script, follow=True).decode(errors="replace").splitlines():
        print_line(line, wraps=False)
