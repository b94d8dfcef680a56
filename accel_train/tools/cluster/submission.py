"""A submission: the recipe with each combination of settings and seeds, and the folder of these runs.

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
import itertools
import json
import math
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accel_train.config.compatibility import START_KEYS, learning_settings
from accel_train.config.options import given_keys, parse, parse_variants, unknown_option
from accel_train.config.recipe import Option
from accel_train.config.schema import Config, option_types, takes_many_values, to_yaml
from accel_train.errors import UserError, raise_mistakes, writing
from accel_train.files import (
    atomic_write,
    is_file_name,
    open_to_write,
    read_json_lines,
    read_regular_file,
    read_stripped,
)
from accel_train.ownership.owner import has_owner, read_result
from accel_train.tools.cluster.scheduler import WAITING, Pbs, Slurm, ask, states_of

RECIPE, LISTS = "recipe.yaml", "jobs"
JOB = re.compile(r"\d{1,18}(_\d{1,18})?|\d{1,18}(\[\d{0,18}\])?\.[A-Za-z0-9][A-Za-z0-9.-]{0,200}")
"""The number of a job: 123, 123_4 (Slurm), 5.server, 5[4].server, 5[].server (PBS)."""
MOST = 10_000
"""The most elements of one submission."""
NODES = "nodes="
LONGEST = 150  # characters of a name, which is that of a folder


@dataclass(frozen=True)
class Element:
    """A run that is to be submitted."""

    name: str
    """Its folder's name, such as "optim.lr=0.1_seed=0": letters, digits and . = + - _ only, which no shell changes."""
    options: tuple[str, ...]
    """In which it differs from the others, as words of a command line."""
    config: Config
    recipe: str
    """The text of a recipe with all of its settings."""
    nodes: int | None = None
    """On how many nodes it is to run; None: as the job script or the user's options of the scheduler say."""


def elements_of(recipe: str, arguments: Sequence[str], seeds: str | None, over: Sequence[str]) -> list[Element]:
    """Return an element for each combination of the seeds ("0-4,7"; None: the recipe's) and of the settings in `over`
    ("optim.lr=0.1,0.01") of `RECIPE [--key value …]`. "nodes=1,2,4" is no setting: the same run on so many nodes.
    Raises UserError, of elements that of the first wrong one."""
    mistakes: list[str] = []
    counts = _node_counts([text for text in over if text.startswith(NODES)], mistakes)
    axes = [_settings(text, mistakes) for text in over if not text.startswith(NODES)]
    if seeds is not None:
        axes.append([Option("seed", (str(seed),), "--seeds") for seed in _seeds(seeds, mistakes)])
    keys = [axis[0].key for axis in axes if axis]
    given = [*keys, *given_keys(arguments)]
    mistakes += [f"--over, --seeds: {key} is given twice." for key in dict.fromkeys(keys) if given.count(key) > 1]
    raise_mistakes(mistakes)
    if (count := math.prod(len(axis) for axis in axes) * len(counts)) > MOST:
        raise UserError(f"{count:,} elements, but one submission has at most {MOST:,}; submit a part of them.")
    variants = [*itertools.product(*axes)]
    elements: dict[tuple[str, int | None], Element] = {}
    for variant, config in zip(variants, parse_variants(recipe, arguments, variants), strict=True):
        text, options = to_yaml(config), tuple(_words(variant))
        for nodes in counts:
            parts = [*([] if nodes is None else [f"nodes={nodes}"]), *filter(None, [_name(variant)])]
            name = "_".join(parts) or _plain(config.recipe, 40)
            elements.setdefault((text, nodes), Element(name, options, config, text, nodes))  # 0.1 and 0.10 are one
    return [*elements.values()]


def _node_counts(texts: Sequence[str], mistakes: list[str]) -> list[int | None]:
    """Return the numbers of "nodes=1,2,4"; [None] if there is no such text."""
    if len(texts) > 1:
        mistakes.append("--over: nodes is given twice.")
    found: list[int | None] = []
    for word in texts[0].removeprefix(NODES).split(",") if texts else ():
        if re.fullmatch("[1-9][0-9]{0,4}", word):
            found.append(int(word))
        else:
            mistakes.append(f"--over: expected numbers of nodes, such as nodes=1,2,4, found {word!r}.")
    return found or [None]


def _settings(text: str, mistakes: list[str]) -> list[Option]:
    """Return the options that "key=value,value" stands for. A comma within a value is written "\\,"."""
    key, equals, values = text.partition("=")
    key, known = key.removeprefix("--").replace("_", "-"), option_types()
    if not equals:
        mistakes.append(f"--over: expected KEY=VALUE,VALUE, such as optim.lr=0.1,0.01, found {text!r}.")
    elif key not in known:
        mistakes.append(unknown_option(key, "--over", known))
    elif key in START_KEYS:
        mistakes.append(f"--over: {key} is no setting that runs can be compared by.")
    else:
        words = [value.replace("\\,", ",") for value in re.split(r"(?<!\\),", values)]
        many = takes_many_values(known[key])
        return [Option(key, tuple(word.split()) if many else (word,), "--over") for word in dict.fromkeys(words)]
    return []


def _seeds(text: str, mistakes: list[str]) -> list[int]:
    if not re.fullmatch(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*", text, re.ASCII):
        mistakes.append(f"--seeds: expected numbers and ranges, such as 0-4 or 1,2,7-9, found {text!r}.")
        return []
    ranges = [(int(part.partition("-")[0]), int(part.rpartition("-")[2])) for part in text.split(",")]
    mistakes += [
        f"--seeds: {first}-{last} is empty: the lower number comes first." for first, last in ranges if last < first
    ]
    if sum(last - first + 1 for first, last in ranges) > MOST:
        mistakes.append(f"--seeds: more than {MOST:,} seeds.")
        return []
    return [*dict.fromkeys(seed for first, last in ranges for seed in range(first, last + 1))]


def _words(variant: Sequence[Option]) -> list[str]:
    return [word for option in variant for word in (f"--{option.key}", *option.values)]


def _name(variant: Sequence[Option]) -> str:
    name = "_".join(f"{option.key}={_plain(' '.join(option.values), 40)}" for option in variant)
    return _plain(name, LONGEST)


def _plain(text: str, most: int) -> str:
    """Return the text, at most `most` characters and with - for those that a shell may change; then with a checksum."""
    plain = re.sub(r"[^A-Za-z0-9.=+_-]+", "-", text)[:most]
    return plain if plain == text else f"{plain}-{zlib.crc32(text.encode(errors='surrogateescape')):08x}"


# --- the folder of a submission ---------------------------------------------------------------------------


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
    text = read_stripped(path, 1000)
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
