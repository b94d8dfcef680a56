"""If the process group for stop signals cannot connect, the run ends in time with one clear line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import helpers
import pytest

WORKER = str(helpers.ROOT / "tests" / "side_group_worker.py")
SECONDS = 5


def both(interface: str) -> list[tuple[int, str]]:
    """Return the exit code and the output of two processes, of which the second uses another `interface`."""
    port, processes = helpers.free_port(), []
    for rank in range(2):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(WORKER).parents[1]),
        }  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "OMPI_"))}
        processes.append(helpers.Captured([WORKER, "1", interface, str(SECONDS)], clean | variables))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Gloo of older versions of torch (2.9) prints a line of its own for each connection.
    outputs = [re.sub(r"^\[Gloo\] .*\n", "", output, flags=re.MULTILINE) for output in outputs]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
def test_an_interface_that_does_not_exist() -> None:
    assert both("lo") == [(0, "connected\n")] * 2
    (other, waited), (code, output) = both("nowhere0")
    assert code == other == 2, output + waited
    assert "Unable to find address for: nowhere0" in output and "Set GLOO_SOCKET_IFNAME" in output
    assert "The processes cannot connect to each other" in waited
    assert "Set GLOO_SOCKET_IFNAME" in waited
    assert output.count("\n") == waited.count("\n") == 1
