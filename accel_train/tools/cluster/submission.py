"""A folder of runs that were submitted together.

FOLDER/ELEMENT/                 the directory of one run
FOLDER/ELEMENT/recipe.yaml      all of its settings, as they were checked
FOLDER/ELEMENT/slurm/job        the job that owns it, or that will continue it
FOLDER/jobs/NAME.jsonl          the elements of the job or array NAME, one a line: line 0 is that of index 0
FOLDER/jobs/NAME.id             its number in the batch system

A list is complete before its job is queued. If it has no number, somebody killed the program in between: then the
batch system is asked for a job of that name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_train.config.compatibility import learning_settings
from accel_train.config.options import parse
from accel_train.errors import UserError, writing
from accel_train.files import atomic_write, open_to_write
from accel_train.ownership.owner import has_owner, read_result
from accel_train.tools.cluster.elements import Element
from accel_train.tools.cluster.scheduler import WAITING, Pbs, Slurm, ask, states_of
from accel_train.untrusted import is_file_name, read_json_lines, read_regular_file

RECIPE, LISTS = "recipe.yaml", "jobs"
JOB = re.compile(r"\d{1,18}(_\d{1,18})?|\d{1,18}(\[\d{0,18}\])?\.[A-Za-z0-9][A-Za-z0-9.-]{0,200}")
"""The number of a job: 123, 123_4 (Slurm), 5.server, 5[4].server, 5[].server (PBS)."""


@dataclass
class Plan:
    """The elements of a submission by what has to be done about them."""

    missing: list[Element] = field(default_factory=list)
    """To be queued: new ones, and those whose job has ended before their run has."""
    finished: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Queued or running, with the job's number: "seed=0 (running, 123_0)"."""


def plan(folder: Path, elements: Sequence[Element]) -> Plan:
    """Return what is left to do of a submission. Changes nothing.

    Raises UserError if a run of the same name learns something else, or if the batch system does not answer.
    """
    for element in elements:
        _check_same(folder / element.name, element)
    jobs = jobs_of_folder(folder)
    found = {element.name: [*jobs.get(element.name, ()), *job_of_run(folder / element.name)] for element in elements}
    try:
        states = states_of(job for numbers in found.values() for job in numbers)
    except UserError as error:
        raise UserError(f"{error} Nothing was queued: these runs may be in the queue already.") from error
    result = Plan()
    for element in elements:
        run = folder / element.name
        job, state = newest(found[element.name], states)
        if read_result(run):
            result.finished.append(element.name)
        elif state in WAITING:
            result.waiting.append(f"{element.name} ({state}, {job})")
        elif has_owner(run):
            result.waiting.append(f"{element.name} (running)")
        else:
            result.missing.append(element)
    return result


def queue(
    folder: Path, elements: Sequence[Element], scheduler: Slurm | Pbs, script: Path, options: Sequence[str]
) -> tuple[Plan, list[str]]:
    """Queue what is left to do of a submission; return the plan and the numbers of the new jobs. Raises UserError.

    If it is killed anywhere, the next call goes on: no element is queued twice.
    """
    lists = folder / LISTS
    with writing("--output-dir", folder, "another folder"):
        lists.mkdir(parents=True, exist_ok=True)
        with _alone(lists) as lock:
            for path, _, number in _read_lists(folder):
                if not number and (number := scheduler.find(path.stem)):
                    atomic_write(path.with_suffix(".id"), number + "\n")
                elif not number:
                    path.unlink()  # it was never queued
            todo = plan(folder, elements)
            numbers: list[str] = []
            for element in todo.missing:
                (folder / element.name).mkdir(exist_ok=True)
                atomic_write(folder / element.name / RECIPE, element.recipe, durable=False)
            for part, path, words in jobs_to_queue(folder, todo.missing, scheduler, script, options):
                lines = [json.dumps({"name": element.name, "options": element.options}) for element in part]
                atomic_write(path, "\n".join(lines) + "\n")
                try:
                    printed = ask(*words, keep_open=(lock,), shown=True)  # 5.server, or of Slurm 123;cluster
                except UserError as error:
                    raise UserError(f"{error}{f' Queued before: {numbers}.' * bool(numbers)}") from error
                numbers.append(printed.strip().partition(";")[0])
                atomic_write(path.with_suffix(".id"), numbers[-1] + "\n")
    return todo, numbers


def jobs_to_queue(
    folder: Path, elements: Sequence[Element], scheduler: Slurm | Pbs, script: Path, options: Sequence[str]
) -> Iterator[tuple[Sequence[Element], Path, list[str]]]:
    """Yield each job or array of the elements: which it has, the path for their list, and the command that queues it.

    The list's name is that of the job: 15 characters, which every PBS accepts. Raises UserError.
    """
    for nodes in dict.fromkeys(element.nodes for element in elements):  # all elements of an array have as many
        alike = [element for element in elements if element.nodes == nodes]
        for first in range(0, len(alike), scheduler.most):
            part = alike[first : first + scheduler.most]
            recipe = re.sub(r"[^A-Za-z0-9]", "", part[0].config.recipe)[:8]
            path = folder / LISTS / f"{recipe if recipe[:1].isalpha() else 'train'}-{uuid.uuid4().hex[:6]}.jsonl"
            yield part, path, scheduler.command(path.stem, path, len(part), script, options, nodes)


def jobs_of_folder(folder: Path) -> dict[str, list[str]]:
    """Return the jobs with which the elements in `folder` were submitted: name -> numbers, the newest last."""
    jobs: dict[str, list[str]] = {}
    for _, names, number in _read_lists(folder):
        of_slurm_array = len(names) > 1 and "." not in number
        for index, name in enumerate(names if number else ()):
            job = f"{number}_{index}" if of_slurm_array else number.replace("[]", f"[{index}]")
            jobs.setdefault(name, []).append(job)
    return jobs


def words_of_element(path: Path, job: str) -> list[str]:
    """Return the words with which a job (123, 123_4, 5.server, 5[4].server) trains its element of the list `path`:
    line 4 if it is number 4 of an array, else line 0. Raises UserError."""
    index = re.search(r"_(\d+)$|\[(\d+)\]", job)
    number = int(index[1] or index[2]) if index else 0
    try:
        name = [str(line.get("name")) for line in read_json_lines(path)][number]
    except (OSError, IndexError):
        name = ""
    if not is_file_name(name):
        raise UserError(f"{path} has no element in line {number + 1}: submit it again with accel-train submit.")
    folder = path.parent.parent / name
    return [str(folder / RECIPE), "--output-dir", str(folder)]


def job_of_run(run: Path) -> list[str]:
    """Return the job that has begun the run last, or that will continue it; [] if it is not known."""
    return _number(run / "slurm" / "job")


def newest(jobs: Sequence[str], states: Mapping[str, str]) -> tuple[str, str]:
    """Return that job of a run which has not ended, else the newest that is known, and its state; else ("", "")."""
    known = [(job, states[job]) for job in reversed(jobs) if job in states]
    return next((each for each in known if each[1] in WAITING), (known or [("", "")])[0])


def _read_lists(folder: Path) -> list[tuple[Path, list[str], str]]:
    """Return the path, the elements and the job's number of each list, the oldest first; "" for an unknown number."""
    paths = [(path.stat().st_mtime, path) for path in (folder / LISTS).glob("*.jsonl")]
    found = []
    for _, path in sorted(paths):
        names = [str(line.get("name")) for line in read_json_lines(path)]
        found.append((path, names, "".join(_number(path.with_suffix(".id")))))
    return found


def _number(path: Path) -> list[str]:
    try:
        text = read_regular_file(path, 1000).decode(errors="replace").strip()
    except OSError:
        return []
    return [text] if is_job(text) else []


def is_job(text: str) -> bool:
    """Whether the text is the number of a job, as `states_of` takes it."""
    return JOB.fullmatch(text) is not None


def _check_same(run: Path, element: Element) -> None:
    """Raise UserError if the run in that folder was submitted with other settings that affect what it learns."""
    path = run / RECIPE
    try:
        if not path.exists() or read_regular_file(path, follow=True).decode() == element.recipe:
            return
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give another --output-dir.") from error
    there, here = learning_settings(parse([str(path)])), learning_settings(element.config)
    if keys := [f"{key} ({there.get(key)} there, {here[key]} here)" for key in here if there.get(key) != here[key]]:
        raise UserError(f"{run} is a run with other settings: {', '.join(keys)}. Give another --output-dir.")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Wait until no other program submits in this folder. Yields a descriptor that extends this to a child process."""
    with open_to_write(folder / ".lock", "ab") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
