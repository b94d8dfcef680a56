"""Agents of torchrun that train one run together, as many as live: each is one `torchrun --nnodes=1:3`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers

# The first agents wait 3 s for more, and count another one as lost after 6 s; torch's own times are 30 s and 15 s.
TIMES = "last_call_timeout=3,keep_alive_interval=2"


class Agent:
    """One `torchrun` with one process, in a session of its own: as one node has them."""

    def __init__(self, command: list[str], log: Path, variables: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                command,
                env=helpers.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: set[int] = set()

    @property
    def rank_process(self) -> int | None:
        """The number of the training process that it has started; None if it has none now."""
        found = [member for member in helpers._family(self.popen.pid)[1:] if _is_rank(member)]
        self._seen.update(found)
        return found[0] if found else None

    def kill(self, number: int = signal.SIGKILL, *, with_rank: bool = False) -> None:
        """Send a signal to the agent; `with_rank`: and to all that it has started, as when its node is lost."""
        for member in helpers._family(self.popen.pid) if with_rank else [self.popen.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)

    def end(self) -> None:
        family = {*helpers._family(self.popen.pid), *self._seen} if self.popen.poll() is None else self._seen
        for member in family:
            if member == self.popen.pid or _is_rank(member):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        self.popen.wait()


def _is_rank(process: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        return "accel_train.train" in words and "torch.distributed.run" not in words
    return False


class Elastic:
    """A run under several agents, of which the first hosts the rendezvous."""

    def __init__(self, run: Path, words: tuple[object, ...], nodes: str, variables: dict[str, str]) -> None:
        self.run, self._variables, self.port = run, variables, helpers.free_port()
        launcher = f"--nnodes={nodes} --nproc-per-node=1 --max-restarts=10 --rdzv-backend=c10d --rdzv-id=elastic"
        launcher += f" --rdzv-endpoint=127.0.0.1:{self.port} --rdzv-conf={TIMES}"
        line = [*launcher.split(), "-m", "accel_train.train", *map(str, words), "--output-dir", str(run)]
        self.command = [sys.executable, "-m", "torch.distributed.run", *line]
        self.agents: list[Agent] = []

    def start(self, address: str = "127.0.0.9") -> Agent:
        """Start one more agent, of a node with that address: the ranks follow from the order of the addresses."""
        command = [*self.command[:3], f"--local-addr={address}", *self.command[3:]]
        agent = Agent(command, self.run.with_name(f"agent-{len(self.agents)}.log"), self._variables)
        self.agents.append(agent)
        return agent

    @property
    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run / "status.json").read_text())  # type: ignore[no-any-return]
        return {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run / "starts.json").read_text())["starts"]  # type: ignore[no-any-return]
        return []

    @property
    def output(self) -> str:
        return "".join(f"--- {agent.log.name}\n{agent.log.read_text(errors='replace')}" for agent in self.agents)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def until(self, happened: Callable[[], Any], seconds: float = 90) -> float:
        """Wait until it has happened; return for how long."""
        began = time.monotonic()
        while not happened():
            if time.monotonic() > began + seconds or all(agent.popen.poll() is not None for agent in self.agents):
                raise AssertionError(f"it did not happen in {seconds} s: {self.status}\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - began

    def until_trained(self, processes: int, updates: int = 20, seconds: float = 120, starts: int = 0) -> float:
        """Wait until a start after the first `starts`, on so many processes, has trained so many updates."""

        def trained() -> bool:
            return any(
                start["processes"] == processes and start["last_update"] >= start["first_update"] + updates
                for start in self.starts[-1:] * (len(self.starts) > starts)
            )

        return self.until(trained, seconds)


def is_listening(port: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1):
        return True
    return False


@contextlib.contextmanager
def elastic(run: Path, *words: object, agents: int = 3, nodes: str = "1:3", **variables: str) -> Iterator[Elastic]:
    """Start agents; whatever is left of them is killed in the end."""
    found = Elastic(run, words, nodes, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | variables)
    try:
        for number in range(agents):
            found.start()
            if number == 0:  # the first is the host
                found.until(lambda: is_listening(found.port))
        yield found
    finally:
        for agent in found.agents:
            agent.end()
