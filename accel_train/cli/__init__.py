"""The command line `accel-train COMMAND …`. Only the programs themselves import this package.

Help and errors appear at once: only the work of a command imports torch.
"""

from __future__ import annotations

import atexit
import importlib
import io
import os
import shlex
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from accel_train import __version__
from accel_train.errors import UntrustedError, UserError, nearest, print_line, print_logged
from accel_train.launch.environment import INTERRUPTED, at_terminal, print_error

COMMANDS = {  # name -> (its module in this folder, imported when it is needed; what the command does)
    "train": ("train", "train a model with a recipe, or resume a run"),
    "submit": ("jobs", "submit trainings to Slurm or PBS, with several seeds and settings"),
    "evaluate": ("evaluate", "evaluate a run's model on a split"),
    "predict": ("evaluate", "classify images with a run's model"),
    "report": ("results", "write a page about a run, or compare several: metrics, speed, curves"),
    "export": ("results", "write a run's model for timm, ONNX or torch.export"),
    "track": ("results", "send a run's curves to TensorBoard, W&B or MLflow"),
    "runs": ("results", "list runs: state, epoch, accuracy, age, owner"),
    "doctor": ("train", "check nodes, data and job limits before a long run"),
    "after-job": ("jobs", "for job scripts: whether to start the job again"),
    "bench": ("recipes", "measure how close the trainer comes to the device's limit"),
    "preview": ("recipes", "write a picture of the images that the model will see"),
    "find-lr": ("recipes", "train with growing learning rates, and draw the loss over them"),
    "init": ("recipes", "write config files, job scripts and a commented recipe into a folder"),
    "recipes": ("recipes", "list the recipes, or print one"),
    "completion": ("help", "complete commands and options with Tab in your shell"),
    "check-data": ("data", "find unreadable images, duplicates and empty classes in a dataset"),
    "shards": ("data", "write a dataset as WebDataset shards: its files, smaller images, or pixels"),
}


def command_function(command: str) -> Callable[[Sequence[str]], int]:
    """Return the function that runs a command, find_lr for find-lr."""
    function: Callable[[Sequence[str]], int] = getattr(_module(command), command.replace("-", "_"))
    return function


def command_class(command: str) -> Any:
    """Return the class with the options of a command, FindLr for find-lr. Those of train are `Config`."""
    return getattr(_module(command), "".join(part.capitalize() for part in command.split("-")))


def _module(command: str) -> Any:
    return importlib.import_module(f"accel_train.cli.{COMMANDS[command][0]}")


def print_commands() -> None:
    """Print the help of accel-train: a line for each command."""
    about = "Train image classifiers: the same run on any number of processes."
    for line in ("usage: accel-train COMMAND …", "", about, ""):
        print_line(line)
    for name, (_, summary) in COMMANDS.items():
        print_line(f"  {name:<12}{summary}")
    print_line("")
    print_line("`accel-train COMMAND --help` shows its options. To begin: accel-train train digits")


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
    from accel_train.user_code import USED  # train and evaluate have imported it; --help does without

    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    measured = sys.gettrace() or sys.getprofile() or (monitoring and any(map(monitoring.get_tool, range(6))))
    threads = any(not each.daemon for each in threading.enumerate() if each is not threading.main_thread())
    late = USED or any(name in sys.modules for name in TRACKERS)  # objects of theirs may do something when deleted
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
        importlib.import_module("accel_train.cli.help").show_help(name, rest)
        return 0
    try:
        return command_function(name)(rest)
    except UntrustedError as error:
        line = shlex.join(["accel-train", name, *rest, "--trust-code", "true"])
        raise UserError(f"{error.what}; if you trust that: {line}") from error
