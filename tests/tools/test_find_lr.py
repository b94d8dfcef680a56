"""`accel-train find-lr`: a range test of the learning rate."""

from __future__ import annotations

import re
from pathlib import Path

import helpers
import numpy as np
import pytest

from accel_train import cli
from accel_train.api import find_lr
from accel_train.tools.find_lr import fit

SMALL = ("digits", "--data.train-limit", "256", "--batch-size", "32", "--optim.name", "momentum")


def test_the_steepest_fall_is_found_up_to_the_minimum() -> None:
    rates = np.geomspace(1e-6, 10, 141)
    position = np.log10(rates)
    # Falls fastest at 0.001, is lowest at 0.1, and then explodes and falls again from there.
    losses = 1 - np.tanh(3 * (position + 3)) / 2 + np.where(position > -1, 50 * (position + 1), 0)
    losses[-5:] = [30, 20, 15, 10, 5]
    noisy = losses + 0.02 * np.random.default_rng(0).normal(size=141)  # from update to update more than the fall
    found = fit(rates.tolist(), noisy.tolist())
    assert found.steepest == pytest.approx(1e-3, rel=0.3)
    calm = np.abs(position + 3) > 1
    calm[position > -1.6] = False
    np.testing.assert_allclose(np.array(found.smoothed)[calm], losses[calm], atol=0.03)


def test_a_loss_that_only_grows_has_no_good_rate() -> None:
    rates = np.geomspace(1e-6, 10, 12).tolist()
    assert fit(rates, [float(number) for number in range(12)]).steepest is None
    assert fit(rates, [12.0 - number for number in range(12)]).steepest is not None
    assert fit(rates[:9], [12.0 - number for number in range(9)]).steepest is None  # too few


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


def test_too_few_updates_and_a_loss_that_diverges_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["find-lr", *SMALL, "--updates", "9"]) == 2
    assert "--updates: expected a number of at least 10, found '9'" in capsys.readouterr().err
    assert len(find_lr(*SMALL, updates=1).losses) == 1
    monkeypatch.setattr("accel_train.tools.find_lr.FIRST_RATE", 1e20)
    monkeypatch.setattr("accel_train.tools.find_lr.LAST_RATE", 1e30)
    assert cli.main(["find-lr", *SMALL, "--updates", "30"]) == 1
    assert "The loss does not fall: look at the data and the recipe." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["lr-digits.svg"]
