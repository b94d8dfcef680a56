"""If the process group for stop signals cannot connect, the run ends in time with one clear line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest

WORKER = str(helpers.ROOT / "tests" / "side_group_worker.py")
SECONDS = 5

pytestmark = pytest.mark.slow


def both(
    changed: int, interface: str, address: str, before: tuple[list[str], list[str]], own: tuple[str, str]
) -> list[tuple]:
    """Return (exit code, output, seconds) of the two processes; rank `changed` uses another `interface`.

    `before`: of each command line; `own`: the interface on which each listens first.
    """
    port, began = helpers.free_port(), time.monotonic()
    processes: list[subprocess.Popen[str] | helpers.Captured] = []
    for rank in range(2):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": own[rank],
            "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(WORKER).parents[1]),
        }  # fmt: skip
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI_", "OMPI_"))}
        line = [*before[rank], sys.executable, WORKER, str(changed), interface, str(SECONDS)]
        env = clean | variables
        processes.append(
            subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if before[rank]
            else helpers.Captured(line[1:], env)
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Gloo of older versions of torch (2.9) prints a line of its own for each connection.
    outputs = [re.sub(r"^\[Gloo\] .*\n", "", output, flags=re.MULTILINE) for output in outputs]
    return [
        (process.returncode, output, time.monotonic() - began)
        for process, output in zip(processes, outputs, strict=True)
    ]


def test_an_interface_that_does_not_exist() -> None:
    here = both(1, "lo", "127.0.0.1", ([], []), ("lo", "lo"))
    assert [(code, output) for code, output, _ in here] == [(0, "connected\n")] * 2
    (other, waited, _), (code, output, _) = both(1, "nowhere0", "127.0.0.1", ([], []), ("lo", "lo"))
    assert code == other == 2, output + waited
    assert "Unable to find address for: nowhere0" in output and "Set GLOO_SOCKET_IFNAME" in output
    assert "did not learn in time where another process listens" in waited
    assert "Set GLOO_SOCKET_IFNAME" in waited
    assert output.count("\n") == waited.count("\n") == 1


@pytest.fixture
def other_host() -> Iterator[tuple[list[str], str, tuple[str, str]]]:
    """A network of its own, as another host has it: what comes before a command line there, the address of this host
    for it, and the interface of each of the two."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("another network needs the program ip, and root")
    name = f"at{os.getpid()}"
    ends = f"{name}a", f"{name}b"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no other network can be made here: {made.stderr.strip()}")
    try:
        for words in (
            f"link add {ends[0]} type veth peer name {ends[1]} netns {name}",
            f"addr add 198.18.77.1/24 dev {ends[0]}",
            f"link set {ends[0]} up",
            f"-n {name} addr add 198.18.77.2/24 dev {ends[1]}",
            f"-n {name} link set {ends[1]} up",
            f"-n {name} link set lo up",
        ):
            done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no other network can be made here: ip {words}: {done.stderr.strip()}")
        yield ["ip", "netns", "exec", name], "198.18.77.1", ends
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
        subprocess.run(["ip", "link", "del", ends[0]], capture_output=True)


@pytest.mark.slow
def test_a_host_whose_address_leads_back_to_the_other_one_itself(
    other_host: tuple[list[str], str, tuple[str, str]],
) -> None:
    """127.0.0.1, to which a host's own name may resolve, is a different host for each host."""
    there, address, interfaces = other_host
    results = both(0, "lo", address, ([], there), interfaces)
    for code, output, seconds in results:
        assert code == 2, results
        assert re.search(r"The processes cannot connect to each other|did not learn in time", output), output
        assert "Set GLOO_SOCKET_IFNAME" in output and output.count("\n") == 1
        assert seconds < 60  # most of it are imports
