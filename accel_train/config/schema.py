"""The configuration of a run: one frozen `Config`, whose fields are the keys of a recipe and of the command line.

The recipe says what to learn. Where to learn it (the number of processes, the kind of device, the precision) is set by
the launcher and is not part of `Config`.

The string under a field is its help text. The groups of options, such as `optim`, are in groups.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from accel_train.config.groups import Augment, Checkpoint, Data, Ema, Loss, Model, Optim, Schedule, Stop
from accel_train.config.origin import Origin

__all__ = [
    "Augment",
    "Checkpoint",
    "Config",
    "Data",
    "Ema",
    "Loss",
    "Model",
    "Optim",
    "Schedule",
    "Stop",
    "as_dict",
    "to_yaml",
    "value",
]


BestMetric = Literal["accuracy", "loss", "f1", "map"]
"""Of the metrics in records/metrics.py."""


@dataclass(frozen=True)
class Config:
    recipe: str = ""
    """Name of the recipe (set by the program)."""
    origin: Origin = field(default_factory=Origin)
    """What the weights were trained with (set by the program)."""
    output_dir: Path | None = None
    """Folder of the run; default: runs/RECIPE/DATE-TIME. If it contains an unfinished run, that run is resumed."""
    seed: int = 0
    """Seed of everything random: weights, order, augmentation, dropout and splits."""
    epochs: int = 1
    """Passes over the training data."""
    batch_size: int = 64
    """Samples per optimizer update, over all processes."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Most samples per process and forward pass; determines gradient accumulation. auto: as many as fit on a GPU."""
    virtual_batch_size: int | None = None
    """Samples that BatchNorm normalises together, on any number of processes; default: by the batch size, 16 to 32."""
    bitwise: bool = False
    """Compute the same weights on any number of processes to the last bit: slower."""
    cuda_graph: bool = False
    """Start all kernels of an update at once (CUDA graphs): faster for small models, on one GPU."""
    eval_batch_size: int | None = None
    """Samples per process and forward pass in evaluation; default: as in training, at least 256."""
    eval_every_epochs: int = 1
    """Evaluate after every N epochs, and after the last epoch."""
    best_metric: BestMetric | None = None
    """Validation metric for the best checkpoint, early stopping and plateau; default: accuracy, or map if an image may
    have several labels."""
    log_every_updates: int = 50
    """Write a line to metrics.jsonl (and to the log, if not on a terminal) every N updates."""
    resume: str = "auto"
    """auto: continue from the newest checkpoint of the run, if any; must: fail without one; never; or a path."""
    allow_change: tuple[str, ...] = ()
    """Options (optim.lr, or a group: optim) that may differ from the resumed checkpoint's."""
    take_over: bool = False
    """Take the run over from the process that owns it, alive or not; that process ends. Applies to this start only."""
    on_nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """On a NaN or infinite loss or gradient: stop; skip the update; or rewind to a checkpoint and skip it there."""
    rendezvous_timeout_seconds: float = 600.0
    """How long processes wait for each other at the start; then the missing ones are named."""
    start_timeout_seconds: float = 3600.0
    """Like hang-timeout-seconds, but until the first update of each start (downloads, compilation); 0: never."""
    hang_timeout_seconds: float = 1800.0
    """Without progress for this time, write the stacks of all threads and end the run; 0: never."""
    share_gpus: bool = False
    """Let several processes of a node share one GPU: slow (gloo instead of NCCL), for tests."""
    trackers: tuple[str, ...] = ()
    """Where to send the curves: tensorboard, wandb, mlflow, … (docs/trackers.md)."""
    config_only: bool = False
    """Print the resolved configuration and the resulting plan, then stop."""
    traceback: bool = False
    """Show the traceback of an error too."""
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    loss: Loss = field(default_factory=Loss)
    ema: Ema = field(default_factory=Ema)
    stop: Stop = field(default_factory=Stop)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def value(config: Config, key: str) -> Any:
    """Return the value of an option such as "optim.lr"."""
    result: Any = config
    for part in key.split("."):
        result = getattr(result, part.replace("-", "_"))
    return result


def as_dict(config: Any) -> dict[str, Any]:
    """Return the configuration as nested plain values, as a recipe file contains them."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        return str(item) if isinstance(item, Path) else item

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


def to_yaml(config: Config) -> str:
    """Return the configuration as the text of a recipe file, which starts the same run again."""
    import yaml

    settings = as_dict(config)
    for key in ("recipe", "origin", "take_over", "config_only", "traceback"):  # of this start, not of the run
        settings.pop(key)
    if config.recipe:  # the file is named config.yaml, and would otherwise be the recipe "config"
        settings = {"about": {"recipe": config.recipe}, **settings}
    return yaml.safe_dump(settings, sort_keys=False)
