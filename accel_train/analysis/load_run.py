"""Opens a run: its configuration, and a new model like its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accel_train import models
from accel_train.config.option_types import value
from accel_train.config.options import parse_run
from accel_train.config.schema import Config, Model
from accel_train.config.url import is_url
from accel_train.data.sources.load import splits_of
from accel_train.data.sources.splits import Splits
from accel_train.errors import UntrustedError, UserError, one_line
from accel_train.models.hub import is_hub_name
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.records.provenance import metric_key
from accel_train.user_code.kept import import_context, kept_text
from accel_train.user_code.reference import GIVEN, parse_reference, texts_of


def read_config(run: Path, *, uses: Sequence[str], trust_code: bool, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run`, with the options `overrides`. Runs none of its code.

    `uses`: the options whose code will be run, if they name a user's own code; with "data.name" the data will be read,
    and with "model.name" the model be made. The run may be somebody else's: raises UntrustedError if that would execute
    or fetch what the run, not one of `overrides`, names, unless `trust_code`. Then code is the text that the run keeps.
    The folder of --data.stage, into which files are copied, is the run's with `trust_code` alone, else the default.
    Objects that were given (user_code/objects.py) take the place of those of the run. Raises UserError.
    """
    config = parse_run(run, overrides)
    named = {word.removeprefix("--").partition("=")[0].replace("_", "-") for word in overrides if word[:2] == "--"}
    given = {option: name for option, (name, _) in GIVEN.items() if option in uses}
    would = []
    for option in uses:
        if option in named or option in given:
            continue
        texts = []
        for text in texts_of(value(config, option)):
            reference = parse_reference(option, text)
            if reference is not None:
                path = kept_text(metric_key(text) if option == "metrics" else option, reference, run)
                folder = import_context(path)[0]
                places = "the environment" if folder is None else f"{folder} or the environment"
                would.append(f"run --{option} {text} (its text is {path}; what it imports comes from {places})")
                text = f"{path.absolute()}:{reference.name}"
            texts.append(text)
        config = _with(config, option, tuple(texts) if option == "metrics" else texts[0])
    would += _arguments(config, uses) if "model.kwargs" not in named else []
    would += _fetched(config, named) if "data.name" in uses and "data.name" not in given else []
    if would and not trust_code:
        raise UntrustedError(f"{run} is a run, and this would {' and '.join(would)}")
    for option, name in given.items():
        config = _with(config, option, name)
    return config if trust_code or "data.stage" in named else _with(config, "data.stage", None)


def _with(config: Config, option: str, setting: Any) -> Config:
    group, _, name = option.rpartition(".")
    changed: Any = {name: setting}
    if group:
        changed = {group: dataclasses.replace(getattr(config, group), **changed)}
    return dataclasses.replace(config, **changed)


def _arguments(config: Config, uses: Sequence[str]) -> list[str]:
    """What the arguments of a library's model may do, if they are more than plain values and lists of these."""
    if "model.name" not in uses or parse_reference("model.name", config.model.name) is not None:
        return []  # the user's own code is judged with its arguments
    arguments = json.loads(config.model.kwargs or "{}")
    return [
        f"use --model.kwargs {one_line(repr(name), 80)}, which is no plain value (see config.yaml)"
        for name, argument in arguments.items()
        if not _is_plain(argument)
    ][:1]


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, list):
        return all(_is_plain(item) for item in argument)
    return argument is None or isinstance(argument, (bool, int, float, str))


def _fetched(config: Config, named: Container[str]) -> list[str]:
    """What would be fetched for the data that the run names, its URL or data set of a hub, and into which folder."""
    stage = config.data.stage
    target = "" if stage is None or "data.stage" in named else f" into --data.stage {stage}"
    if "data.name" not in named and config.data.name.startswith("hfds/"):
        return [f"fetch --data.name {config.data.name}{target}"]
    if "data.root" not in named and is_url(config.data.root):
        return [f"fetch --data.root {config.data.root}{target}"]
    return []


def data_of_run(run: Path, *, trust_code: bool) -> tuple[Config, Splits]:
    """Return the configuration of the run in the folder `run` and the data that it names, if that is on this machine:
    nothing is downloaded. Raises UserError; see `read_config` for `trust_code`."""
    config = read_config(run, uses=("data.name",), trust_code=trust_code)
    return config, splits_of(config, download=False)


def empty_model(model: Model, info: ModelInfo) -> nn.Module:
    """Return the model of a run without its weights, on the CPU. Raises UserError if it cannot be created."""
    if is_hub_name(model.name) and info.origin.model != model.name:
        raise UserError(
            f"{FILE} does not have the architecture of {model.name}; copy it again from where the run was trained."
        )
    return models.create_model(
        model,
        num_classes=len(info.classes),
        channels=info.channels,
        image_size=info.training_size,
        published=False,
        origin=info.origin,
    )
