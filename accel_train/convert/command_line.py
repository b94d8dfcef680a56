"""Reads the command line of another trainer as that trainer does, with the launcher before it."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from accel_train.convert.command import (
    Command,
    load_yaml,
    not_an_option,
    read_pairs,
    read_settings,
    read_text,
    settings_of,
    with_defaults,
)
from accel_train.convert.peers import PEERS, Peer
from accel_train.errors import UserError

PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--nproc", "--ntasks-per-node", "--num_gpus")
NODES = ("--nnodes", "--n_nodes", "--num_nodes", "--nodes", "-N")
IN_ALL = ("--num_processes", "--num-processes", "-np", "--ntasks", "-n")
WRITE_A_NUMBER = "write a number there, or give --processes N"
STARTS_SEVERAL = ("srun", "mpirun", "mpiexec", "accelerate", "deepspeed")
"""Launchers that start a number of processes that something else says, if their options do not."""
WRAPPERS = ("nice", "ionice", "numactl", "taskset", "env", "python", "python3")
"""Programs that may stand between a launcher and the script: their -n and -N mean something else."""
TRAIN = ("train.py", "distributed_train.sh", "yolo")


def read_command(text: str, peer: str | None = None, processes: int | None = None) -> Command:
    """Read a command, or the file that `text` names.

    `peer`, `processes`: of which trainer, and on how many processes, if the words do not say so. Raises UserError if
    they are of no known trainer, or if that trainer would not accept them.
    """
    if path := _file(text):
        content = read_text(path)
        if path.suffix in (".yaml", ".yml"):
            return read_settings(content, path.name, peer, processes)
        text = content
    line = _line_of(text)
    if variables := [word for word in line if re.search(r"\$\w|\$\{|\$\(|`|%\w+%", word)]:
        raise UserError(f"{', '.join(variables)}: the shell replaces this; write the value itself.")
    launcher, script, arguments = _split(line)
    found = processes or _processes(launcher, _of_job(text))
    if Path(script).name == "yolo":
        return read_pairs(PEERS["ultralytics"], arguments, shlex.join(line), processes or 1)
    if script.endswith(".sh"):
        if not (arguments and arguments[0].isdigit()):
            raise UserError(f"{script}: expected the number of processes as the first word after it.")
        found, arguments, peer = processes or int(arguments[0]), arguments[1:], peer or "timm"
    chosen = PEERS[peer] if peer else _recognise(script, arguments)
    if chosen.name == "ultralytics":
        return read_pairs(chosen, arguments, shlex.join(line), found)
    values = _parse(chosen, arguments)
    return with_defaults(chosen, values, found, shlex.join(line))


def _file(text: str) -> Path | None:
    """Return the file that the text names, if it does. A command may be too long for a name."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if (path := Path(text).expanduser()).is_file():
            return path
    return None


def _line_of(text: str) -> list[str]:
    """Return the words of the one command in `text` that starts a training, without what the shell does with its
    output. Lines may be continued, with a backslash or as on Windows."""
    joined = re.sub(r"[\\^`][ \t]*\r?\n", " ", text.strip())
    lines = [re.sub(r"^\s*(!|\$\s)", "", line) for line in joined.splitlines()]  # the prompt of a notebook or a shell
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    try:
        commands = [command for line in lines for command in _commands(line)]
    except ValueError as error:
        raise UserError(f"the command cannot be read: {error}; is a quotation mark missing?") from error
    starts = [words for words in commands if any(_is_script(word) for word in words)]
    if len(starts) > 1:  # another one may prepare the data, or validate
        starts = [words for words in starts if any(Path(word).name in TRAIN for word in words)] or starts
    if len(starts) > 1:
        raise UserError(f"found {len(starts)} commands that start a training; give one.")
    return starts[0] if starts else [word for words in commands for word in words]


def _commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line, without redirections. Raises ValueError."""
    # A backslash before a letter is one of a path of Windows; a shell would drop it.
    line = re.sub(r"'[^']*'|\\(?=\w)", lambda found: found[0] if found[0] != "\\" else "\\\\", line)
    line = re.sub(r"(?<=\s)\d(?=[<>])", "", line)  # of 2>&1
    words = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    words.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in words:
        if not re.fullmatch("[;&|<>]+", word):
            commands[-1].append(word)
        elif "<" in word or ">" in word:
            next(words, "")  # the file
        else:
            commands.append([])
    return [words for words in commands if words]


def _is_script(word: str) -> bool:
    name = Path(word).name
    return name in TRAIN or (word.endswith(".py") and not word.startswith("-"))


def _split(line: list[str]) -> tuple[list[str], str, list[str]]:
    """Return (the words before the script, the script, its arguments)."""
    at = next((index for index, word in enumerate(line) if _is_script(word)), None)
    if at is None:
        raise UserError(
            f"{' '.join(line[:4])!r}: no train.py, distributed_train.sh or yolo in it, and no file of that name; give "
            "the whole command."
        )
    return line[:at], line[at], line[at + 1 :]


def _of_job(text: str) -> list[str]:
    """Return the options that a job script has for Slurm."""
    return [word for options in re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE) for word in options.split()]


def _processes(launcher: Sequence[str], job: Sequence[str]) -> int:
    """Return how many processes torchrun, accelerate launch, mpirun or srun would start. `job`: what srun is told by
    the script that it is in."""
    names = [Path(word).name for word in launcher]
    values = (_numbers(job) if "srun" in names else {}) | _numbers(launcher)
    for flag, value in values.values():
        if not value.isdigit() or int(value) < 1:
            raise UserError(f"{flag} {value}: the number of processes is not known; {WRITE_A_NUMBER}.")
    known = {of: int(value) for of, (_, value) in values.items()}
    unknown = [name for name in names if name in STARTS_SEVERAL]
    if unknown and not {IN_ALL, PER_NODE} & {*known}:
        raise UserError(f"{unknown[0]}: the command does not say how many processes it starts; give --processes N.")
    return known.get(IN_ALL) or known.get(PER_NODE, 1) * known.get(NODES, 1)


def _numbers(words: Sequence[str]) -> dict[tuple[str, ...], tuple[str, str]]:
    """Return what the words say of the processes: which options -> (the one that was given, its value)."""
    values = dict[tuple[str, ...], tuple[str, str]]()
    program = ""
    for index, word in enumerate(words):
        program = name if (name := Path(word).name) in (*STARTS_SEVERAL, *WRAPPERS) else program
        flag, equals, value = word.partition("=")
        if program in WRAPPERS and flag in ("-n", "-N"):
            continue
        if short := re.fullmatch(r"(-n|-N|-np)(\d+)", word):
            flag, equals, value = short[1], "=", short[2]
        for options in (PER_NODE, NODES, IN_ALL):
            if flag in options:
                values[options] = flag, value if equals else (*words, "")[index + 1]
    return values


def _recognise(script: str, arguments: Sequence[str]) -> Peer:
    """Return the trainer whose options these are: by the script's folder, else by what only one of them knows."""
    for peer, folder in (("torchvision", "references/classification"), ("timm", "pytorch-image-models")):
        if folder in script:
            return PEERS[peer]
    unknown = {name: _unknown_flags(PEERS[name], arguments) for name in ("timm", "torchvision")}
    if unknown["timm"] == unknown["torchvision"]:
        raise UserError(
            "timm's train.py and torchvision's both have these options; say whose command it is: "
            "--peer timm or --peer torchvision."
        )
    return PEERS[min(unknown, key=lambda name: unknown[name])]


def _unknown_flags(peer: Peer, arguments: Sequence[str]) -> int:
    try:
        unknown = _parser(peer, checks_types=False).parse_known_args(arguments)[1]
    except UserError:  # an ambiguous or incomplete one, which is the peer's all the same
        return 1
    return len([word for word in unknown if word.startswith("-")])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; so that trainer would not accept it.")


def _parser(peer: Peer, *, checks_types: bool = True) -> _Parser:
    """Return argparse's parser with the peer's options, which returns only those that are given."""
    parser = _Parser(prog=peer.name, argument_default=argparse.SUPPRESS, add_help=False)
    for option in peer.all_options.values():
        keywords: dict[str, Any] = {}
        if option.flags[0].startswith("-"):
            keywords["dest"] = option.name
        if option.kind == "flag":
            keywords["action"] = "store_true"
        else:
            keywords["type"] = {"int": int, "float": float}.get(option.kind, str) if checks_types else str
            if option.count:
                keywords["nargs"] = int(option.count) if option.count.isdigit() else option.count[0]
            if option.count.startswith("?") and option.flags[0].startswith("-"):
                keywords["const"] = option.count[1:]
        parser.add_argument(*option.flags, **keywords)
    return parser


def _parse(peer: Peer, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the words give the peer's options. Raises one UserError with all it does not know."""
    found, unknown = _parser(peer).parse_known_args(arguments)
    names = [flag for option in peer.options.values() for flag in option.flags]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    mistakes = [not_an_option(peer, flag, names) for flag in flags]
    if unknown and not flags:
        mistakes = [f"{' '.join(unknown)!r}: neither an option of {peer.name} nor the value of one."]
    if mistakes:
        raise UserError(*mistakes)
    values = {name: value for name, value in vars(found).items() if value is not None}
    if config := values.pop("config", None):
        settings, _ = settings_of(peer, load_yaml(read_text(Path(config)), config))
        values = settings | values
    return values
