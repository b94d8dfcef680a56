"""The configuration of a run: one frozen `Config`, whose fields are the keys of a recipe and of the command line.

The recipe says what to learn. Where to learn it (the number of processes, the kind of device, the precision) is set by
the launcher and is not part of `Config`.

The groups of options, such as `optim`, are in groups/; training.py there says how an option is declared. Values that
do not fit each other are in contradictions.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from accel_train.config.declaration import (
    AFTER_FAILURE,
    DECIDES_SAMPLES,
    ENDING,
    ENDS_RUN,
    NOT_NEGATIVE,
    ONE_START,
    POSITIVE,
    Bound,
    Free,
)
from accel_train.config.groups.augment import Augment
from accel_train.config.groups.data import Data
from accel_train.config.groups.model import Model
from accel_train.config.groups.training import Checkpoint, Ema, Loss, Optim, Schedule, Stop
from accel_train.config.origin import Origin

__all__ = ["Augment", "Checkpoint", "Data", "Ema", "Loss", "Model", "Optim", "Schedule", "Stop"]  # handed on


@dataclass(frozen=True)
class Config:
    recipe: Annotated[str, ONE_START] = ""
    """Name of the recipe (set by the program)."""
    origin: Origin = field(default_factory=Origin)
    """What the weights were trained with (set by the program)."""
    output_dir: Annotated[
        Path | None,
        ONE_START,
    ] = None
    """Folder of the run; default: runs/RECIPE/DATE-TIME. If it contains an unfinished run, that run is resumed."""
    seed: Annotated[int, NOT_NEGATIVE, DECIDES_SAMPLES] = 0
    """Seed of everything random: weights, order, augmentation, dropout and splits."""
    epochs: Annotated[
        int | float,
        POSITIVE,
        Free("a run may become longer", unless=ENDING),
        ENDS_RUN,
    ] = 1
    """Passes over the training data; the last may be a part: 2.5."""
    batch_size: Annotated[
        int,
        POSITIVE,
        Bound("a number of at most 2,000,000,000", lambda x: x <= 2_000_000_000),
    ] = 64
    """Samples per optimizer update, over all processes."""
    micro_batch_size: Annotated[
        int | None,
        POSITIVE,
        Free("how an update is computed, not its result"),
    ] = None
    """Most samples per process and forward pass; determines gradient accumulation."""
    virtual_batch_size: Annotated[int | None, POSITIVE] = None
    """Samples that BatchNorm normalises together, on any number of processes; default: by the batch size, 16 to 32."""
    bitwise: bool = False
    """Compute the same weights on any number of processes to the last bit: slower."""
    eval_batch_size: Annotated[
        int | None,
        POSITIVE,
        Free("only what is measured"),
    ] = None
    """Samples per process and forward pass in evaluation; default: 256, or as in training
    if those are more; for a smaller split the next power of two."""
    eval_every_epochs: Annotated[
        int,
        POSITIVE,
        Free("only what is measured", unless=("plateau",)),
    ] = 1
    """Evaluate after every N epochs, and after the last epoch."""
    eval_every_updates: Annotated[int | None, POSITIVE, Free("only what is measured")] = None
    """Evaluate after every N updates too."""
    best_metric: str | None = None
    """Validation metric for the best checkpoint, early stopping and plateau: accuracy, loss, f1, map (of images with
    several labels), or the name of one of --metrics; default: accuracy or map."""
    metrics: Annotated[tuple[str, ...], Free("only what is measured")] = ()
    """More metrics of each evaluation: top5_accuracy, or your own, FILE.py:NAME (docs/own_metrics.md)."""
    log_every_updates: Annotated[
        int,
        POSITIVE,
        Free("only what is shown"),
    ] = 50
    """Write a line to metrics.jsonl (and to the log, if not on a terminal) every N updates."""
    resume: Annotated[
        str,
        ONE_START,
    ] = "auto"
    """auto: continue from the newest checkpoint of the run, if any; must: fail without one; never; or a path."""
    allow_change: Annotated[tuple[str, ...], ONE_START] = ()
    """Options (optim.lr, or a group: optim) that may differ from the resumed checkpoint's."""
    take_over: Annotated[bool, ONE_START] = False
    """Take the run over from the process that owns it, alive or not; that process ends. Applies to this start only."""
    on_nonfinite: Annotated[Literal["stop", "skip", "rewind"], AFTER_FAILURE] = "stop"
    """On a NaN or infinite loss or gradient: stop; skip the update; or rewind to a checkpoint and skip it there."""
    rendezvous_timeout_seconds: Annotated[float, POSITIVE, AFTER_FAILURE] = 600.0
    """How long processes wait for each other at the start; then the missing ones are named."""
    start_timeout_seconds: Annotated[float, NOT_NEGATIVE, AFTER_FAILURE] = 3600.0
    """Like hang-timeout-seconds, but until the first update of each start (downloads, compilation); 0: never."""
    hang_timeout_seconds: Annotated[float, NOT_NEGATIVE, AFTER_FAILURE] = 1800.0
    """Without progress for this time, write the stacks of all threads and end the run; 0: never."""
    share_gpus: Annotated[bool, Free("where the run is computed")] = False
    """Let several processes of a node share one GPU: slow (gloo instead of NCCL), for tests."""
    trackers: Annotated[
        tuple[str, ...],
        Free("only what is shown"),
    ] = ()
    """Where to send the curves: tensorboard, wandb or mlflow (docs/trackers.md)."""
    config_only: Annotated[bool, ONE_START] = False
    """Print the resolved configuration and the resulting plan, then stop."""
    traceback: Annotated[bool, ONE_START] = False
    """Show the traceback of an error too."""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    ema: Ema = field(default_factory=Ema)
    stop: Annotated[Stop, Free("a run may end earlier or later")] = field(default_factory=Stop)
    checkpoint: Annotated[Checkpoint, Free("only what is kept")] = field(default_factory=Checkpoint)


def as_dict(config: Any) -> dict[str, Any]:
    """Return the configuration as nested plain values, as a recipe file contains them."""

    def plain(item: Any) -> Any:
        return list(item) if isinstance(item, tuple) else str(item) if isinstance(item, Path) else item

    return dataclasses.asdict(config, dict_factory=lambda fields: {name: plain(item) for name, item in fields})


def to_yaml(config: Config) -> str:
    """Return the configuration as the text of a recipe file, which starts the same run again."""
    import yaml

    settings = as_dict(config)
    for key in ("recipe", "origin", "take_over", "config_only", "traceback"):  # of this start, not of the run
        settings.pop(key)
    if config.recipe:  # the file is named config.yaml, and would otherwise be the recipe "config"
        settings = {"about": {"recipe": config.recipe}, **settings}
    return yaml.safe_dump(settings, sort_keys=False)


def best_metric(config: Config, *, multi_label: bool) -> str:
    """The name of the figure that decides about the best checkpoint, the plateau schedule and the patience."""
    return config.best_metric or ("map" if multi_label else "accuracy")
