"""Errors that a user can fix, and lines on a terminal or in a log.

An error is one line that says what was wrong, what was found and what to do. Printing a line never ends a run, even if
nobody reads it.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

LOGGER = logging.getLogger("accel_train")
"""Gets what commands say while they work, and warnings. The command line prints them: `print_logged`."""


class UserError(Exception):
    """The user's input (command line, recipe, data, environment) is wrong, not the program.

    It is shown without a traceback, one line a mistake, on one process only.
    """

    def __init__(self, *messages: str, every_process: bool = True, code: int = 2) -> None:
        """`messages` are the mistakes, one line each; usually there is one. `str(error)` is one line with all of them.

        `every_process`: all processes of the run raise this same error, so the first process alone prints it. An error
        that only one process can see (an unreadable image, for example) is printed by that process. `code`: the
        program's exit code; 1 if the work is done, but not as it should be.
        """
        super().__init__(" ".join(messages))
        self.messages = messages
        self.every_process, self.code = every_process, code


class UnsavedError(UserError):
    """A training has ended, but not all that it should leave could be saved. Its console has said so already.

    `stopped_by`: what asked it to stop, such as "SIGINT".
    """

    def __init__(self, message: str, *, stopped_by: str = "") -> None:
        super().__init__(message, code=1)
        self.stopped_by = stopped_by


class UntrustedError(UserError):
    """A command would execute or fetch what a run names, and the user has not said --trust-code."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; if you trust that, add --trust-code true.")
        self.what = what


class EvaluationError(UserError):
    """An image cannot be read in an evaluation, or a metric of --metrics has failed. All processes raise it."""


def raise_mistakes(mistakes: Iterable[str]) -> None:
    """Raise one UserError that lists all `mistakes`, each of them once; do nothing if there are none."""
    if messages := tuple(dict.fromkeys(mistakes)):
        raise UserError(*messages)


# What is no letter, but a command to a terminal: C0, DEL and C1; separators of lines and paragraphs; what shows the
# text after it in another order (U+202A to U+202E, U+2066 to U+2069), which words from right to left do not need. Half
# surrogates are the bytes of a file's name that is not UTF-8.
COMMANDS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object, most: int | None = None) -> str:
    """Return the text with line breaks and other commands to a terminal escaped: a file's content may contain them.

    A text of more than `most` characters is cut before the word that passes them, and ends with " …".
    """
    line = COMMANDS.sub(lambda match: repr(match[0])[1:-1], str(text))
    if most is None or len(line) <= most:
        return line
    return (line[: most + 1].rpartition(" ")[0] or line[:most]) + " …"


def reason_of(error: BaseException, most: int | None = None) -> str:
    """Return the first line of what an exception says, without its full stop, or its type if it says nothing.

    `most`: as `one_line` has it.
    """
    return one_line((str(error).strip() or type(error).__name__).splitlines()[0], most).rstrip(".")


def nearest(name: str, known: Iterable[str], count: int = 1, least: float = 0.5) -> str:
    """Return a hint with the `count` known names most similar to `name`, " Did you mean …?", or "" if none is.

    `least`: similarity, from 0 to 1, of a name that is proposed.
    """
    matches = difflib.get_close_matches(name, list(known), n=count, cutoff=least)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first `most` names and how many more there are: "a, b, c and 4 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: float, thing: str) -> str:
    """Return "1 update", "0.5 epochs", "2 processes" or "1,563 updates"."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"


@contextlib.contextmanager
def writing(option: str, path: Path, instead: str = "another file") -> Iterator[None]:
    """Turn an OSError within it into a UserError: the `path` that the `option` names cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{option}: {path} cannot be written ({reason}); name {instead}.") from error


@contextlib.contextmanager
def needing(message: str) -> Iterator[None]:
    """Turn an ImportError within it, of an optional package, into a UserError with the `message`: how to install it."""
    try:
        yield
    except ImportError as error:
        raise UserError(message) from error


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody may be looking at `stream`.

    Open MPI gives its processes a terminal of its own, also if mpirun's output goes to a file; then it is none.
    """
    try:
        if not os.isatty(stream.fileno()):
            return False
        if "OMPI_COMM_WORLD_RANK" in os.environ:
            target = Path(f"/proc/{os.getppid()}/fd/{stream.fileno()}").readlink()
            return str(target).startswith(("/dev/pts/", "/dev/tty"))
    except (OSError, ValueError):
        return False
    return True


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print one line to `stream` (default: stdout).

    All that is printed goes through here, but for tables, bars and the display of a run on a terminal. Whatever names
    the text contains, it is one line, and no command to the terminal: see `one_line`. A closed pipe or a full disk does
    not raise an error.
    """
    stream = stream or sys.stdout
    try:
        print(one_line(text), file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # else the interpreter fails when it flushes at exit


class _Lines(logging.Handler):
    """Prints what is logged: warnings on stderr, the rest on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print_line(f"accel-train: {record.levelname.lower()}: {record.getMessage()}", sys.stderr)
        else:
            print_line(record.getMessage())


def print_logged() -> None:
    """Print from now on what is logged, instead of handing it on."""
    LOGGER.handlers, LOGGER.propagate = [_Lines()], False
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)


def how_to_get(name: str) -> str:
    """Return a sentence for messages that send users to the file or folder `name`, or "" if it exists here."""
    return "" if Path(name).exists() else f" There is no {name} here: `accel-train init .` writes it."
