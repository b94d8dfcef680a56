"""`accel-train find-lr`: a range test of the learning rate."""

from __future__ import annotations

import re
from pathlib import Path

import helpers
import numpy as np
import pytest

from accel_train.api import find_lr
from accel_train.errors import UserError
from accel_train.tools.find_lr import suggestion

SMALL = ("digits", "--data.train-limit", "256", "--batch-size", "32", "--optim.name", "momentum")


def test_the_steepest_fall_is_found_up_to_the_minimum() -> None:
    rates = np.geomspace(1e-6, 10, 141)
    position = np.log10(rates)
    # Falls fastest at 0.001, is lowest at 0.1, and then explodes and falls again from there.
    losses = 1 - np.tanh(3 * (position + 3)) / 2 + np.where(position > -1, 50 * (position + 1), 0)
    losses[-5:] = [30, 20, 15, 10, 5]
    noisy = losses + 0.02 * np.random.default_rng(0).normal(size=141)  # from update to update more than the fall
    assert suggestion(rates.tolist(), noisy.tolist(), losses.tolist()) == pytest.approx(1e-3, rel=0.3)


def test_a_loss_that_only_grows_has_no_good_rate() -> None:
    assert suggestion([1.0, 2.0, 4.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) is None
    assert suggestion([1.0, 2.0, 4.0], [2.0, 1.9, 3.0], [2.0, 1.9, 3.0]) is None


@pytest.mark.ci
def test_it_finds_a_rate_and_keeps_nothing_but_the_picture(tmp_path: Path) -> None:
    line = ("-m", "accel_train", "find-lr", "digits", "--output", "lr.svg")
    done = helpers.python(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rate = float(re.search(r"--optim.lr (\S+?),", done.stdout)[1])  # type: ignore[index]
    assert 1e-3 < rate < 1, done.stdout
    assert "update 10/100, learning rate 4.3e-06, loss " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["lr.svg"]
    assert "learning rate" in (tmp_path / "lr.svg").read_text()


@pytest.mark.slow
def test_any_number_of_processes_finds_the_same(tmp_path: Path) -> None:
    script = f"""
import json, os
from accel_train.api import find_lr
found = find_lr(*{SMALL!r}, updates=30)
os.write(1, f"found: {{json.dumps(found.losses)}}\\n".encode())
"""
    losses = []
    for processes in (1, 2):
        done = helpers.python("-c", script, cwd=tmp_path, processes=processes)
        assert done.returncode == 0, done.stderr
        told = re.findall(r"found: \[(.*)\]", done.stdout)
        assert len(told) == processes and len({*told}) == 1
        losses.append([float(text) for text in told[0].split(",")])
    np.testing.assert_allclose(losses[0][:20], losses[1][:20], rtol=1e-4)


def test_a_loss_that_diverges_ends_the_test() -> None:
    found = find_lr(*SMALL, "--optim.momentum", "0.99", updates=60)
    assert len(found.rates) == len(found.losses) == len(found.smoothed) < 60


@pytest.mark.parametrize("end", [("--epochs", "1"), ("--stop.updates", "2"), ("--epochs", "0.3")])
@pytest.mark.timeout(120)
def test_the_recipe_may_have_fewer_updates(end: tuple[str, str]) -> None:
    assert len(find_lr(*SMALL, *end, updates=10).rates) == 10


def test_too_few_updates_and_a_loss_that_diverges_at_once_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"--updates: expected at least 10"):
        find_lr(*SMALL, updates=1)
    monkeypatch.setattr("accel_train.tools.find_lr.FIRST_RATE", 1e20)
    monkeypatch.setattr("accel_train.tools.find_lr.LAST_RATE", 1e30)
    with pytest.raises(UserError, match=r"diverged after \d+ updates?, at a learning rate of \S+: look at the data"):
        find_lr(*SMALL, updates=30)
