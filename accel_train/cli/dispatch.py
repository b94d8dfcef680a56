"""`accel-train COMMAND …`. Help and errors come at once: torch is imported by the command's own work only."""

from __future__ import annotations

import io
import signal
import sys
import traceback
from collections.abc import Sequence

from accel_train import __version__
from accel_train.cli.imports import importing
from accel_train.errors import UserError, nearest, one_line
from accel_train.launch.environment import INTERRUPTED, at_terminal, is_first_process, prepare_environment
from accel_train.launch.signals import recording_stop_signals

COMMANDS = {
    "train": "train a model as a recipe says, or go on with a run",
    "evaluate": "evaluate a run's model over a split",
    "predict": "classify images with a run's model",
    "bench": "measure how near the trainer comes to the limit of the device",
    "recipes": "list the recipes, or print one",
    "check-data": "find the unreadable images of a data set",
    "cache-data": "write a data set's images, made ready, into one file",
    "scaling": "compare the speed of finished runs on different numbers of processes",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 2 for a user's error (one line on stderr), 130 for Ctrl-C.

    At a terminal Ctrl-C is raised again, so that the program dies of it. The shell's code is 130, too, but only so does
    it end a loop in which the program was called.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without UTF-8 is no reason to fail
    try:
        code = _run(words)
    except UserError as error:
        if any(word.startswith("--traceback") for word in words):
            traceback.print_exc()
        if is_first_process() or not error.every_process:
            print(f"accel-train: error: {one_line(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED and at_terminal():
        sys.excepthook = lambda *_: None  # no traceback
        raise KeyboardInterrupt
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        _print_help()
        return 0 if words else 2
    command, rest = words[0], words[1:]
    if command == "--version":
        print(f"accel-train {__version__}")
        return 0
    if command not in COMMANDS:
        raise UserError(f"unknown command {command!r}.{nearest(command, COMMANDS)} See accel-train --help.")
    if command == "train":
        with recording_stop_signals():
            from accel_train.config import options

            config = options.parse(rest)
            if config.config_only:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… --config-only | head` ends quietly
            launch = prepare_environment()  # before torch is imported, which reads some of it
            with importing("" if config.config_only else config.recipe):
                from accel_train.launch.accelerator import end_world
                from accel_train.train import train

            code = train(config, launch)
            end_world()
            return code

    from accel_train.cli import commands

    rest = [word for word in rest if word != "--traceback"]
    if command == "recipes":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `recipes | head` ends quietly
        return commands.recipes(rest)
    function = {
        "evaluate": commands.evaluate,
        "predict": commands.predict,
        "bench": commands.bench,
        "check-data": commands.check_data,
        "cache-data": commands.cache_data,
        "scaling": commands.scaling,
    }
    return function[command](rest)


def _print_help() -> None:
    print("usage: accel-train COMMAND …\n\nTrain image classifiers: the same run on any number of processes.\n")
    for name, summary in COMMANDS.items():
        print(f"  {name:<12}{summary}")
    print("\n`accel-train COMMAND --help` tells more. To begin: accel-train train digits")
