"""Options whose values do not fit each other, though each is within its own bounds."""

from __future__ import annotations

import math

from accel_train.config.declaration import BEST_METRICS, FALLING, NAMES_OF_FIGURES
from accel_train.config.schema import Config, Loss, Model
from accel_train.user_code.reference import CHOSEN_METRICS, metric_name, parse_reference


def contradictions(config: Config) -> dict[str, str]:
    """Return the options whose values do not fit those of other options: key -> the expected value, in words.

    Each value must be within its own bounds. `configs` in tests/config/test_options.py must avoid each of them.
    """
    mistakes: dict[str, str] = {}
    if config.data.val_fraction + config.data.test_fraction >= 1:
        mistakes["data.val-fraction"] = "data.val-fraction + data.test-fraction below 1"
    if config.virtual_batch_size is not None:
        mistakes |= _contradictions_of_virtual_batch(config, config.virtual_batch_size)
    if config.schedule.name == "multistep" and not config.schedule.milestones:
        mistakes["schedule.milestones"] = "at least one epoch for schedule.name=multistep"
    mistakes |= _contradictions_of_model(config.model)
    if config.augment.crop_fraction is not None and config.augment.resize is not None:
        mistakes["augment.crop-fraction"] = "none with augment.resize: both say how evaluation images are resized"
    if config.optim.head_lr is not None and not config.optim.lr:
        mistakes["optim.head-lr"] = "none with optim.lr=0, to which it would be in proportion (model.freeze-body?)"
    if config.data.sampler == "balanced" and config.loss.class_weights == "balanced":
        mistakes["loss.class-weights"] = "none with data.sampler=balanced: both together correct the imbalance twice"
    if config.loss.name != "binary_cross_entropy":
        for name in ("bce_target_threshold", "bce_pos_weight"):
            if getattr(config.loss, name) != getattr(Loss(), name):
                mistakes[f"loss.{name}".replace("_", "-")] = "its default unless loss.name=bce, whose option it is"
    names = [metric_name(text) for text in config.metrics]
    users = [metric_name(text) for text in config.metrics if text not in CHOSEN_METRICS]
    if taken := [name for name in users if name in NAMES_OF_FIGURES or name.startswith("class_")]:
        mistakes["metrics"] = f"names that no built-in figure has (rename {', '.join(taken)})"
    elif twice := {name for name in names if names.count(name) > 1}:
        mistakes["metrics"] = f"each name once (rename {', '.join(sorted(twice))})"
    if config.best_metric not in (None, *BEST_METRICS, *names):
        others = f" or {', '.join(names)} of --metrics" if names else " (others: name them with --metrics, too)"
        mistakes["best-metric"] = f"one of {', '.join(BEST_METRICS)}{others}"
    mistakes |= _contradictions_of_schedule(config)
    return mistakes


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number in increasing order. Takes 0.1 s for numbers as large as 10**12."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _contradictions_of_virtual_batch(config: Config, size: int) -> dict[str, str]:
    mixes = config.augment.mixes
    possible = [n for n in divisors(config.batch_size) if not (mixes and n % 2)]
    if not possible or size in possible:
        return {}
    near = sorted(sorted(possible, key=lambda n: abs(math.log(n / size)))[:2])
    pairs = " that is even, as mixup and cutmix need" * mixes
    expected = f"a divisor of the batch size {config.batch_size}{pairs}, such as {' or '.join(map(str, near))}"
    return {"virtual-batch-size": expected}


def _contradictions_of_model(model: Model) -> dict[str, str]:
    mistakes: dict[str, str] = {}
    if model.weights is not None and model.pretrained:
        mistakes["model.weights"] = "none with model.pretrained=true: a run begins from one of them"
    frozen = model.freeze_body or model.freeze
    if model.freeze_body and model.freeze:
        mistakes["model.freeze"] = "none with model.freeze-body=true, which freezes all but the last layer"
    if model.freeze_epochs is not None and not frozen:
        mistakes["model.freeze-epochs"] = "none without model.freeze-body or model.freeze: nothing is frozen"
    return mistakes


def _contradictions_of_schedule(config: Config) -> dict[str, str]:
    schedule, mistakes = config.schedule, dict[str, str]()
    if schedule.warmup_epochs > config.epochs:
        mistakes["schedule.warmup-epochs"] = f"at most the {config.epochs:g} epochs of the run"
    is_own = parse_reference("schedule.name", schedule.name) is not None
    if config.ema.scale_decay and schedule.name not in FALLING and not is_own:
        mistakes["ema.scale-decay"] = f"false without schedule.name {', '.join(FALLING)}, which fix the epochs, too"
    return mistakes
