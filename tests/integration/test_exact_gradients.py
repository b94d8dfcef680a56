"""The sums of ExactGradients on 1, 2 and 4 real processes: the same bits, however the virtual batches are divided."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

WORKER = helpers.ROOT / "tests" / "exact_gradients_worker.py"


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What each process of each world has found; see exact_gradients_worker.py."""
    found = []
    for world in (1, 2, 4):
        folder = tmp_path_factory.mktemp(f"sums-{world}")
        done = helpers.python(WORKER, folder, processes=world)
        assert done.returncode == 0, done.stdout + done.stderr
        found += [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return found


@pytest.mark.parametrize("kind", ["given", "nan", "-inf", "DDP"])
def test_the_bits_are_the_same_on_all_processes_of_all_worlds(sums: list[dict[str, list[str]]], kind: str) -> None:
    of_kind = [digests for process in sums for case, digests in process.items() if case.startswith(f"{kind},")]
    assert len(sums) == 7 and len(of_kind) == 7 * (3 if kind == "DDP" else 4)
    assert [digests for digests in of_kind if digests != of_kind[0]] == []
    finite = [digest not in ("None", "NaN") for digest in of_kind[0]]
    if kind == "DDP":
        assert all(finite)
    else:
        assert finite == [True, kind == "given", True, False, True]
        assert of_kind[0][1] == "NaN" or kind == "given"
        assert of_kind[0][3] == "None"
