"""The line about the learning rate of a run whose settings have changed."""

from __future__ import annotations

import itertools
from pathlib import Path

import helpers
import pytest


@pytest.mark.ci
def test_a_run_that_goes_on_says_where_its_learning_rate_goes(tmp_path: Path) -> None:
    """Its numbers are those of the log: the next update has the learning rate that the line names."""
    run = tmp_path / "run"

    def train(*words: object) -> tuple[str, list[float]]:
        done = helpers.run("digits", "--output-dir", run, "--log-every-updates", 1, *words)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if "the learning rate " in line]
        rates = [float(line.partition(" lr ")[2].split()[0]) for line in done.stdout.splitlines() if " lr " in line]
        return said[0] if said else "", rates

    assert train("--epochs", 1)[0] == ""
    longer = ["--epochs", 2, "--allow-change", "epochs"]
    said, rates = train(*longer)
    assert said.endswith(f"the learning rate goes from 0 to {rates[0]:.3g}, because of the changed settings")
    assert train(*longer)[0] == ""  # nothing is left to do
    said, rates = train("--epochs", 3, "--optim.lr", 0.02, "--allow-change", "epochs", "optim.lr")
    assert f"goes from 0 to {rates[0]:.3g}" in said
    assert all(later < earlier for earlier, later in itertools.pairwise(rates)) and rates[0] < 0.02
