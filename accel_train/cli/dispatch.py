"""`accel-train COMMAND …`. Help and errors appear at once: only the work of a command imports torch."""

from __future__ import annotations

import atexit
import io
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from accel_train import __version__
from accel_train.cli.commands import COMMANDS, command_function, print_commands
from accel_train.errors import UntrustedError, UserError, nearest, print_line, print_logged
from accel_train.launch.environment import INTERRUPTED, at_terminal, print_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 or 1 for a UserError (one line a mistake on stderr), 130 for Ctrl-C.

    At a terminal KeyboardInterrupt is raised again, so that the program is killed by SIGINT. The shell's code is 130
    in both cases, but only a program killed by SIGINT stops the shell loop that runs it.
    """
    print_logged()
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # without it, a locale other than UTF-8 would end the program
    try:
        code = _run(words)
    except UserError as error:
        if any(word.startswith("--traceback") for word in words):
            traceback.print_exc()
        print_error(error)
        return error.code
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED and at_terminal():
        sys.excepthook = lambda *_: None  # no traceback
        raise KeyboardInterrupt
    return code


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command as a program: its exit code is the process's. For Python there is api.py."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = main(words)
    if words[:1] in (["train"], ["evaluate"]) and may_end_at_once():
        end_at_once(code)
    sys.exit(code)


TRACKERS = ("wandb", "mlflow", "tensorboard")


def may_end_at_once() -> bool:
    """Whether nothing needs the interpreter any more: no tracker, no code of the user's, no thread, no profiler."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    measured = sys.gettrace() or sys.getprofile() or (monitoring and any(map(monitoring.get_tool, range(6))))
    threads = any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread())
    own_code = getattr(sys.modules.get("accel_train.user_code.loading"), "USED", [])
    late = own_code or any(name in sys.modules for name in TRACKERS)  # objects of theirs may do something when deleted
    return not (measured or threads or sys.flags.inspect or late)


def end_at_once(code: int) -> None:
    """Call what is registered for the exit, flush, and end the process. The interpreter would take itself apart first,
    module by module, which lasts a second after torch was used. Returns if what was printed cannot be written."""
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter has an exit code for it
        return
    os._exit(code)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print_commands()
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name == "--version":
        print_line(f"accel-train {__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}.{nearest(name, COMMANDS)} See accel-train --help.")
    if {"-h", "--help"} & {*rest[: rest.index("--") if "--" in rest else None]}:  # after it are words for others
        from accel_train.cli.help import show_help

        show_help(name, rest)
        return 0
    try:
        return command_function(name)(rest)
    except UntrustedError as error:
        line = shlex.join(["accel-train", name, *rest, "--trust-code", "true"])
        raise UserError(f"{error.what}; if you trust that: {line}") from error
