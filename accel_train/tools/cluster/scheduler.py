"""Slurm and PBS: how an array is submitted, what they say about jobs, and how a job like it is submitted again."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accel_train.errors import UserError, print_line, reason_of

ANSWER_SECONDS, LOOK_SECONDS = 60.0, 10.0
"""How long a scheduler may take to answer: one that is overloaded takes many seconds. The second is for a mere look."""
WAITING = ("queued", "requeued", "running", "suspended")
"""The states of a job that has not ended."""


@dataclass(frozen=True)
class Job:
    """What a job's own script can learn of it. A job that it submits would inherit none of the options."""

    options: list[str]
    """Those of sbatch or qsub with which it was submitted, as far as they are known."""
    script: str
    may_requeue: bool = True
    variables: tuple[str, ...] = ()
    """The names of the variables that the user has given to it (PBS)."""


class Slurm:
    """sbatch, squeue and scontrol."""

    name, program, script = "slurm", "sbatch", "slurm/train.sbatch"
    more_time = "sbatch --time"
    most = 1000  # elements of an array: MaxArraySize is 1001 by default
    reserved = re.compile(r"--array(?!=%[1-9]\d*$)|--(job-name|clusters|wrap|wait|parsable|test-only)(=|$)|-[aJMW]")
    """Options that a user may not give: those of `command`, and those with which the job could not be found again. Of
    --array=%4 only the number of elements that may run at a time is the user's."""

    def command(
        self, job: str, elements: Path, count: int, script: Path, options: Sequence[str], nodes: int | None = None
    ) -> list[str]:
        """Return the command that submits the list `elements`, of `count` lines, as a job or an array named `job`."""
        limit, options = split_limit(options, "--array=")
        array = [f"--array=0-{count - 1}{limit}"] if count > 1 else []
        options += [f"--nodes={nodes}"] if nodes else []
        log = str(elements.parent).replace("%", "%%") + ("/%x-%A_%a.log" if array else "/%x-%j.log")
        ours = ["sbatch", "--parsable", f"--job-name={job}", "--nodes=1", f"--output={log}", *array]
        return [*ours, *options, str(script), str(elements)]

    def find(self, name: str) -> str:
        """Return the number of the user's job with this name; "" if there is none. Raises UserError."""
        answer = ask("squeue", "--me", "--noheader", "--states=all", f"--name={name}", "--format=%F")
        return (answer.split() or [""])[0]

    def states(self, jobs: Iterable[str], seconds: float) -> dict[str, str]:
        """Return the states of these jobs and of their elements, 123 and 123_4, without forgotten jobs. Raises
        UserError."""
        numbers = sorted({job.partition("_")[0] for job in jobs})
        chosen = [f"--jobs={','.join(numbers)}"] if len(numbers) <= 1000 else []
        words = ["--array", "--noheader", "--states=all", "--Format=JobArrayID:40,State:20,RestartCnt:10"]
        answer = ask("squeue", *words, *chosen, unknown="Invalid job id", seconds=seconds)
        return {job: _slurm_state(state, restarts) for job, state, restarts in map(str.split, answer.splitlines())}

    def job(self, number: str, words: Sequence[str], env: Mapping[str, str]) -> Job:
        """Return what this job, whose variables are `env`, knows of itself. `words`: those behind its script."""
        record: dict[str, str] = {}
        with suppress(UserError):  # there may be no scontrol in a container
            shown = ask("scontrol", "show", "job", "--oneliner", number, seconds=LOOK_SECONDS).strip()
            record = dict(re.findall(r"([A-Z][A-Za-z/:]*)=(.*?)(?= [A-Z][A-Za-z/:]*=|$)", shown))
        known = {name: value for name, value in record.items() if value not in ("", "(null)", "N/A", "UNLIMITED")}
        nodes = env.get("SLURM_NNODES", "1")
        asked = {
            "nodes": nodes,
            **{option: known.get(name) for option, name in OF_RECORD.items()},
            **{option: env.get("SLURM_" + option.upper().replace("-", "_")) for option in OF_VARIABLES},
            "mem": env.get("SLURM_MEM_PER_NODE"),
            "gres": re.sub("gres[:/]", "", known.get("TresPerNode", "")),  # also of --gpus-per-node
            "gpus": env.get("SLURM_GPUS"),
        }
        options = [f"--{option}={value}" for option, value in asked.items() if value]
        options += ["--exclusive"] * (record.get("OverSubscribe") == "NO")
        script = known.get("Command", self.script).removesuffix("".join(f" {word}" for word in words))
        return Job(options, script, record.get("Requeue", "1") != "0")

    def again(self, job: Job, words: Sequence[str], variables: Mapping[str, str]) -> str:
        """Return the line that a person types to train with these `words` in a job like this one."""
        given = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
        return given + shlex.join(["sbatch", *job.options, job.script, *words])


def split_limit(options: Sequence[str], array: str) -> tuple[str, list[str]]:
    """Return how many elements of an array may run at a time, "%4" or "", and the options without `array`, which says
    it ("-J")."""
    limits = [word.removeprefix(array) for word in options if word.startswith(array)]
    return "".join(limits[-1:]), [word for word in options if not word.startswith(array)]


OF_RECORD = {
    "job-name": "JobName", "partition": "Partition", "time": "TimeLimit", "account": "Account", "qos": "QOS",
    "constraint": "Features", "reservation": "Reservation", "licenses": "Licenses", "exclude": "ExcNodeList",
}  # fmt: skip
"""Options of sbatch -> their names in Slurm's record of a job."""
OF_VARIABLES = ("mem-per-cpu", "mem-per-gpu", "ntasks-per-node", "cpus-per-task", "gpus-per-task", "gpus-per-socket")
"""Options of sbatch for which Slurm sets a variable in the job."""


def _slurm_state(state: str, restarts: str) -> str:
    if state == "PENDING" and restarts != "0":
        return "requeued"
    known = {"PENDING": "queued", "COMPLETED": "finished", "TIMEOUT": "out of time", "REQUEUE_HOLD": "requeued",
             "COMPLETING": "running", "CONFIGURING": "running"}  # fmt: skip
    return known.get(state, state.lower().replace("_", " "))


class Pbs:
    """qsub and qstat of OpenPBS and PBS Professional."""

    name, program, script = "pbs", "qsub", "pbs/train.pbs"
    more_time = "qsub -l walltime"
    most = 10_000  # elements of an array: max_array_size is 10000 by default
    reserved = re.compile(r"-J(?!%[1-9]\d*$)|-[NIXz]")

    def command(
        self, job: str, elements: Path, count: int, script: Path, options: Sequence[str], nodes: int | None = None
    ) -> list[str]:
        """As `Slurm.command`, with -J%4. The job finds the list in the variable TRAIN."""
        if re.search(r"""["'\\]""", str(elements)):
            raise UserError(f"--output-dir: qsub cannot pass on the quote or backslash in {elements.parent}.")
        limit, options = split_limit(options, "-J")
        array = ["-J", f"0-{count - 1}{limit}"] if count > 1 else []
        if nodes is not None:
            if not any(word.startswith("select=") for word in options):
                raise UserError("--over nodes: give -l select=1:ncpus=…, of which the 1 becomes each number of nodes.")
            options = [re.sub(r"^select=\d*:?", f"select={nodes}:", word) for word in options]
        variables, others, words = ["TRAIN"], [], iter(options)
        for word in words:  # of several -v, qsub obeys the last
            if word.startswith("-v"):
                variables.append(word[2:] or next(words, ""))
            else:
                others.append(word)
        # -f: without it qsub leaves a process behind, for a minute, which would keep the lock of the submission.
        ours = ["qsub", "-f", "-N", job, "-v", ",".join(variables), "-o", f"{elements.parent}/", *array]
        return ["env", f"TRAIN={elements}", *ours, *others, str(script)]

    def find(self, name: str) -> str:
        """As `Slurm.find`."""
        answer = ask("qselect", "-x", "-N", name) or ask("qselect", "-N", name)
        return (answer.split() or [""])[0]

    def states(self, jobs: Iterable[str], seconds: float) -> dict[str, str]:
        """As `Slurm.states`, of 5.server and 5[4].server."""
        numbers = sorted({re.sub(r"\[\d+\]", "[]", job) for job in jobs})
        words = ["-f", "-t", *numbers]
        # Where PBS keeps no history of jobs that have ended, -x shows nothing at all.
        answer = ask("qstat", "-x", *words, unknown="Job Id", seconds=seconds)
        answer = answer or ask("qstat", *words, unknown="Job Id", seconds=seconds)
        found = {}
        for record in re.split(r"^Job Id: ", answer, flags=re.MULTILINE)[1:]:
            values = dict(re.findall(r"^    (\w+) = (.*)$", record, flags=re.MULTILINE))
            found[record.split()[0]] = _pbs_state(values)
        return found

    def job(self, number: str, words: Sequence[str], env: Mapping[str, str]) -> Job:
        """As `Slurm.job`."""
        shown = ""
        with suppress(UserError):
            shown = ask("qstat", "-f", number, seconds=LOOK_SECONDS).replace("\n\t", "")  # it folds long values
        record = dict(re.findall(r"^ *([\w.]+) = (.*)$", shown, flags=re.MULTILINE))
        asked = {name.partition(".")[2]: value for name, value in record.items() if name.startswith("Resource_List.")}
        chunks = re.findall(r"[:+](\w+)=", f":{asked.get('select', '')}:{record.get('schedselect', '')}")
        options: list[str] = []
        for name, value in asked.items():  # all but what PBS computes: the number of nodes, sums over chunks
            if name not in ("nodect", "neednodes", *chunks):
                options += ["-l", f"{name}={value}"]
        options += ["-q", queue] if (queue := env.get("PBS_O_QUEUE")) else []  # not the one that a routing queue chose
        for option, name in OF_QSTAT.items():
            if (value := record.get(name, "")) not in ("", "_pbs_project_default"):
                options += [option, value]
        options += ["-W", f"group_list={record['group_list']}"] if "group_list" in record else []
        names = re.findall(r"(?:^|(?<!\\),)([A-Za-z_]\w*)=", record.get("Variable_List", ""))
        script = (record.get("Submit_arguments", "").split() or [""])[-1]
        given = tuple(name for name in names if not name.startswith("PBS_"))
        there = script if script and Path(script).is_file() else self.script
        return Job(options, there, variables=given)

    def again(self, job: Job, words: Sequence[str], variables: Mapping[str, str]) -> str:
        """As `Slurm.again`. qsub -v turns quotes into backslashes."""
        given = {**variables, "TRAIN": shlex.join(words)}
        passed = "-V" if re.search(r"""["'\\,]""", "".join(given.values())) else f"-v {','.join(given)}"
        assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
        return f"{assigned} qsub {passed} {shlex.join([*job.options, job.script])}"


OF_QSTAT = {"-A": "Account_Name", "-P": "project", "-N": "Job_Name", "-m": "Mail_Points", "-M": "Mail_Users"}
"""Options of qsub -> their names in PBS's record of a job."""


def _pbs_state(values: dict[str, str]) -> str:
    state, code = values.get("job_state", ""), values.get("Exit_status", "0")
    if state in ("Q", "H", "W", "T"):
        return "requeued" if values.get("run_count", "0") != "0" else "queued"
    if state in ("F", "X"):
        return "finished" if code == "0" else "out of time" if code == "-29" else f"failed ({code})"
    return {"S": "suspended", "U": "suspended"}.get(state, "running")


SCHEDULERS: tuple[Slurm | Pbs, ...] = (Slurm(), Pbs())


def ask(
    *words: str,
    unknown: str = "",
    keep_open: Collection[int] = (),
    seconds: float = ANSWER_SECONDS,
    shown: bool = False,
) -> str:
    """Return what a scheduler's command prints. Raises UserError if it fails, or does not answer in time.

    `unknown`: a failure that says this means that the scheduler has forgotten jobs, of which nothing is printed.
    `keep_open`: descriptors that the command inherits. `shown`: what it says on stderr is for the user, too.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=seconds, pass_fds=keep_open
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{words[0]} has not answered within {seconds:g} s; try again later.") from None
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {reason_of(error)}.") from error
    if done.returncode and not (unknown and unknown in done.stderr):
        lines = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
        said = " ".join(filter(None, map(str.strip, lines)))
        raise UserError(f"{words[0]} has failed (exit code {done.returncode}); it says: {said.rstrip('.')}.")
    for line in done.stderr.splitlines() if shown else ():
        print_line(line, sys.stderr)
    return done.stdout


def answers(job: str) -> bool:
    """Whether the scheduler to which a job belongs is installed here."""
    return any(shutil.which(each.program) for each in SCHEDULERS if ("." in job) == (each.name == "pbs"))


def states_of(jobs: Iterable[str], seconds: float = ANSWER_SECONDS) -> dict[str, str]:
    """Return the states of these jobs, of Slurm (123, 123_4) or PBS (5.server, 5[4].server): one call of its command.

    Jobs that the scheduler has forgotten, and those of a scheduler that is not installed here, are left out. Raises
    UserError.
    """
    found: dict[str, str] = {}
    jobs = set(jobs)
    for scheduler in SCHEDULERS:
        theirs = [job for job in jobs if ("." in job) == (scheduler.name == "pbs")]
        if theirs and shutil.which(scheduler.program):
            found |= scheduler.states(theirs, seconds)
    return found
