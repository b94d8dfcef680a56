"""Errors that a user can mend: one line that says what was wrong, what was found and what to do.

And lines on the terminal or in a log, which never end a run because nobody reads them.
"""

from __future__ import annotations

import atexit
import difflib
import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import TextIO


class UserError(Exception):
    """The user's input (command line, recipe, data, environment) is at fault, not the program.

    Shown as one line without a traceback, on one process only; the exit code is 2.
    """

    def __init__(self, message: str, *, every_process: bool = True) -> None:
        """`every_process` says that all processes of the run find this same error, so that only the first
        one need speak. What only one process can see (an unreadable image, say) it must report itself."""
        super().__init__(message)
        self.every_process = every_process


def one_line(text: object) -> str:
    """The text without line breaks and other control characters, which a file's content may bring into a message."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], str(text))


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """A hint that names the `count` known names most like `name`: " Did you mean …?", or ""."""
    matches = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def print_line(text: str, stream: TextIO | None = None) -> None:
    """A log that can no longer be written, for its reader has gone or its disk is full, does not end a run."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _to_nowhere(stream)
    except OSError:  # a disk may have space again for the next line
        _give_up_at_the_end(stream)


@cache
def _give_up_at_the_end(stream: TextIO) -> None:
    """The interpreter tries once more to write what could not be written, and would fail for it (exit code 120)."""

    def last_try() -> None:
        try:
            stream.flush()
        except OSError:
            _to_nowhere(stream)

    atexit.register(last_try)


def _to_nowhere(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
