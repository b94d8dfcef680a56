"""Opens a run: its configuration, and its weights in a new model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accel_train import models
from accel_train.checkpoint.choose import find_weights as find_weights
from accel_train.checkpoint.weights import RunWeights
from accel_train.config.options import parse_run
from accel_train.config.schema import Config, Model, value
from accel_train.errors import UserError, one_line
from accel_train.models.weights.hub import is_hub_name
from accel_train.records.code import kept_code, trained_code
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.user_code.reference import parse_reference
from accel_train.user_code.trust import doubtful_arguments


def read_config(run: Path, *, uses: Sequence[str], trust_code: bool, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in the folder `run`, with the options `overrides`. Runs none of its code.

    `uses`: the options whose code will be run, if they name a user's own code. The run may be somebody else's, so this
    code is only used with `trust_code`, or if this user has trained the run; see `KeptCode`. The same is true of
    arguments of a library's model that could open a file. Raises UserError otherwise.
    """
    config, own, text = parse_run(run, overrides)
    trained = trained_code(run, text)
    if "model.name" in uses and trained is None and not trust_code and config.model.kwargs == own.model.kwargs:
        _check_arguments(run, own)
    for option in uses:
        reference = parse_reference(option, value(own, option))
        if reference is not None and value(config, option) == value(own, option):
            group, _, name = option.partition(".")
            trusted: Any = {name: kept_code(option, reference, run).to_run(option, trained=trained, trust=trust_code)}
            changed: Any = {group: dataclasses.replace(getattr(config, group), **trusted)}
            config = dataclasses.replace(config, **changed)
    return config


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


def load_model(model: Model, info: ModelInfo, weights: RunWeights | Path) -> nn.Module:
    """Return the model of a run with `weights` (or those in a file), on the CPU, in evaluation mode.

    Raises UserError if the weights cannot be read or belong to another model.
    """
    network = empty_model(model, info)
    (weights if isinstance(weights, RunWeights) else RunWeights.read(weights)).load_into(network)
    return network.eval()


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
        image_size=info.image_size,
        published=False,
        origin=info.origin,
    )
