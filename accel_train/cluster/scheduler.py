"""Slurm and PBS: how an array is submitted, and what they say about jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from accel_train.errors import UserError, reason_of

ANSWER_SECONDS, LOOK_SECONDS = 60.0, 10.0
"""How long a scheduler may take to answer: one that is overloaded takes many seconds. The second is for a mere look."""
WAITING = ("queued", "requeued", "running", "suspended")
"""The states of a job that has not ended."""


class Slurm:
    """sbatch and squeue."""

    name, program, script = "slurm", "sbatch", "slurm/multi_node.sbatch"
    most = 1000  # elements of an array: MaxArraySize is 1001 by default
    reserved = re.compile(r"--(array|job-name|clusters|wrap|wait|parsable|test-only)(=|$)|-[aJMW]")
    """Options that a user may not give: those of `command`, and those with which the job could not be found again."""

    def command(self, job: str, elements: Path, count: int, script: Path, options: Sequence[str]) -> list[str]:
        """Return the command that submits the list `elements`, of `count` lines, as a job or an array named `job`."""
        array = [f"--array=0-{count - 1}"] if count > 1 else []
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


def _slurm_state(state: str, restarts: str) -> str:
    if state == "PENDING" and restarts != "0":
        return "requeued"
    known = {"PENDING": "queued", "COMPLETED": "finished", "TIMEOUT": "out of time", "REQUEUE_HOLD": "requeued",
             "COMPLETING": "running", "CONFIGURING": "running"}  # fmt: skip
    return known.get(state, state.lower().replace("_", " "))


class Pbs:
    """qsub and qstat of OpenPBS and PBS Professional."""

    name, program, script = "pbs", "qsub", "pbs/train.pbs"
    most = 10_000  # elements of an array: max_array_size is 10000 by default
    reserved = re.compile(r"-[JNIXz]")

    def command(self, job: str, elements: Path, count: int, script: Path, options: Sequence[str]) -> list[str]:
        """As `Slurm.command`. The job finds the list in the variable TRAIN."""
        if re.search(r"""["'\\]""", str(elements)):
            raise UserError(f"--output-dir: qsub cannot pass on the quote or backslash in {elements.parent}.")
        array = ["-J", f"0-{count - 1}"] if count > 1 else []
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


def _pbs_state(values: dict[str, str]) -> str:
    state, code = values.get("job_state", ""), values.get("Exit_status", "0")
    if state in ("Q", "H", "W", "T"):
        return "requeued" if values.get("run_count", "0") != "0" else "queued"
    if state in ("F", "X"):
        return "finished" if code == "0" else "out of time" if code == "-29" else f"failed ({code})"
    return {"S": "suspended", "U": "suspended"}.get(state, "running")


SCHEDULERS: tuple[Slurm | Pbs, ...] = (Slurm(), Pbs())


def ask(*words: str, unknown: str = "", keep_open: Collection[int] = (), seconds: float = ANSWER_SECONDS) -> str:
    """Return what a scheduler's command prints. Raises UserError if it fails, or does not answer in time.

    `unknown`: a failure that says this means that the scheduler has forgotten jobs, of which nothing is printed.
    `keep_open`: descriptors that the command inherits.
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
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise UserError(f"{words[0]} has failed (exit code {done.returncode}); it says: {said.rstrip('.')}.")
    return done.stdout


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
