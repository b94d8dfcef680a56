"""The commands that exist. Their modules are imported when they are needed: `accel-train --help` imports none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from accel_train.errors import print_line

COMMANDS = {  # name -> (its module in this folder, what it does)
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
