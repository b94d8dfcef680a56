"""Which settings may change when a run is resumed, and the errors for the others."""

from dataclasses import replace
from pathlib import Path

import pytest

from accel_train.config.compatibility import (
    affects_learning,
    check_changes,
    differences,
    flatten,
    learning_fingerprint,
)
from accel_train.config.schema import Config, Optim, Schedule, as_dict
from accel_train.errors import UserError

KEYS = flatten(as_dict(Config()))


def allowed(saved, new, allow=()):
    """Return the differences of the configuration `new` from the `saved` settings. Raises UserError."""
    changes = differences(saved, new)
    check_changes(changes, new, allow)
    return changes


def test_what_is_learned_is_refused_by_default():
    learned = {key for key in KEYS if affects_learning(key, "cosine")}
    assert {"seed", "batch-size", "epochs", "optim.lr", "model.name", "data.val-fraction", "ema.decay"} <= learned
    assert {"augment.mixup", "loss.label-smoothing", "schedule.min-lr", "data.drop-last"} <= learned
    assert not {"micro-batch-size", "data.root", "data.workers", "output-dir", "checkpoint.keep"} & learned


def test_a_refusal_shows_all_differences_and_how_to_allow_them():
    new = Config(seed=1, optim=Optim(lr=0.2), log_every_updates=7)
    with pytest.raises(UserError) as error:
        allowed(as_dict(Config()), new)
    assert "seed: 0 -> 1; optim.lr: 0.1 -> 0.2." in str(error.value)
    assert "--allow-change seed optim.lr" in str(error.value)
    assert "log-every" not in str(error.value)


@pytest.mark.parametrize("allow", [("optim.lr", "optim.weight-decay"), ("optim.lr", "optim.weight_decay"), ("optim",)])
def test_a_key_or_its_group_can_be_allowed(allow):
    new = Config(optim=Optim(lr=0.2, weight_decay=0.5))
    found = allowed(as_dict(Config()), new, allow)
    assert found == {"optim.lr": "0.1 -> 0.2", "optim.weight-decay": "0.0 -> 0.5"}
    with pytest.raises(UserError, match="seed: 0 -> 3"):
        allowed(as_dict(Config()), replace(new, seed=3), allow)


def test_harmless_changes_are_noted_and_those_of_the_start_are_not():
    new = Config(micro_batch_size=8, output_dir=Path("elsewhere"), resume="must", recipe="r")
    assert allowed(as_dict(Config()), new) == {"micro-batch-size": "None -> 8"}


@pytest.mark.parametrize(
    ("name", "refused"), [("cosine", True), ("poly", True), ("constant", False), ("plateau", False)]
)
def test_more_epochs_are_refused_where_the_schedule_ends_with_them(name, refused):
    old, new = (Config(epochs=n, schedule=Schedule(name=name)) for n in (2, 3))
    if refused:
        with pytest.raises(UserError, match="epochs: 2 -> 3"):
            allowed(as_dict(old), new)
    else:
        assert allowed(as_dict(old), new) == {"epochs": "2 -> 3"}


def test_a_key_that_the_checkpoint_does_not_know_had_its_default():
    saved = as_dict(Config())
    del saved["ema"]
    saved["an_old_key"] = 3
    assert allowed(saved, Config()) == {}


def test_a_wrong_key_to_allow_is_an_error_that_names_the_nearest():
    with pytest.raises(UserError, match=r"no option 'optim.lrr'\. Did you mean 'optim.lr'"):
        allowed(as_dict(Config()), Config(), ["optim.lrr"])


def test_the_digest_is_of_what_is_learned():
    assert learning_fingerprint(Config(log_every_updates=1)) == learning_fingerprint(Config())
    assert learning_fingerprint(Config(seed=1)) != learning_fingerprint(Config())
