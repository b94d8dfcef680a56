"""Errors that a user can mend: one line that says what was wrong, what was found and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


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
