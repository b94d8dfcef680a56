"""Short waits for the tests of owners."""

from __future__ import annotations

import pytest

from accel_train.ownership import claim as claim_module
from accel_train.ownership import owner as owner_module


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits to seconds, and hide the job in which the tests may run."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, seconds in {"BEAT": 0.1, "CONFIRM": 0.3, "STALE": 1.5, "POLL": 0.02}.items():
        for module in (claim_module, owner_module):
            monkeypatch.setattr(module, f"{name}_SECONDS", seconds, raising=False)
