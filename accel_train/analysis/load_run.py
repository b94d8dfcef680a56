"""Opens a run: its configuration, and a new model like its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accel_train import models
from accel_train.config.option_types import value
from accel_train.config.options import parse_run
from accel_train.config.schema import Config, Model
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError, one_line
from accel_train.models.weights.hub import is_hub_name
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.records.provenance import code_to_run, metric_key, trained_code
from accel_train.user_code.record import doubtful_arguments
from accel_train.user_code.reference import GIVEN, parse_reference


def read_config(run: Path, *, uses: Sequence[str], trust_code: bool, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run`, with the options `overrides`. Runs none of its code.

    Objects that were given (user_code/objects.py) take the place of those of the run.

    `uses`: the options whose code will be run, if they name a user's own code. The run may be somebody else's, so this
    code is only used with `trust_code`, or if this user has trained the run; see `code_to_run`. The same is true of
    arguments of a library's model that could open a file. Raises UserError otherwise.
    """
    config, own, text = parse_run(run, overrides)
    trained = trained_code(run, text)
    if "model.name" in uses and trained is None and not trust_code and config.model.kwargs == own.model.kwargs:
        _check_arguments(run, own)
    given = {option: name for option, (name, _) in GIVEN.items() if option in uses}
    for option in uses:
        if option == "metrics":
            trusted = [_trusted_metric(text, run, trained, trust=trust_code) for text in config.metrics]
            config = dataclasses.replace(config, metrics=tuple(trusted))
            continue
        reference = parse_reference(option, value(own, option))
        if option not in given and reference is not None and value(config, option) == value(own, option):
            given[option] = code_to_run(option, reference, run, trained=trained, trust=trust_code)
    for option, to_run in given.items():
        group, _, name = option.partition(".")
        path: Any = {name: to_run}
        changed: Any = {group: dataclasses.replace(getattr(config, group), **path)}
        config = dataclasses.replace(config, **changed)
    return config


def data_of_run(run: Path, *, trust_code: bool) -> tuple[Config, Splits]:
    """Return the configuration of the run in the folder `run` and the data that it names, if that is on this machine:
    nothing is downloaded. Raises UserError; see `read_config` for `trust_code`."""
    config = read_config(run, uses=("data.name",), trust_code=trust_code)
    return config, load_splits(config.data, config.seed, download=False, record=run)


def _trusted_metric(text: str, run: Path, trained: Mapping[str, str] | None, *, trust: bool) -> str:
    reference, key = parse_reference("metrics", text), metric_key(text)
    return text if reference is None else code_to_run(key, reference, run, trained=trained, trust=trust)


def _check_arguments(run: Path, config: Config) -> None:
    """Raise UserError if an argument for a library's model could open a file: the run may be somebody else's."""
    if parse_reference("model.name", config.model.name) is not None:
        return  # the user's own code is judged with its arguments
    if doubtful := doubtful_arguments(json.loads(config.model.kwargs or "{}")):
        raise UserError(
            f"--model.kwargs: {one_line(repr(doubtful[0]), 80)} could open a file or fetch one, and you have not "
            f"trained the run with this configuration on this machine. Read {run / 'config.yaml'}; if you trust it, "
            "add --trust-code true."
        )


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
