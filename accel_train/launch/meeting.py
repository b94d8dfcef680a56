"""The meeting of the hosts before a launcher starts on each of them: `accel-train meet`.

Launchers wait for each other before they start this program, for up to ten minutes and more, and name no host that is
missing. So the hosts meet at the same address and port first, for as long as --rendezvous-timeout-seconds says. Each
host sends a line of JSON to machine 0, which sends its verdict to all: an empty line if all is well. Without torch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass

from accel_train import __version__
from accel_train.errors import UserError
from accel_train.launch.process import hostname, ranges
from accel_train.untrusted import is_count, json_object

LONGEST = 4096  # bytes of a line
VERDICT_SECONDS = 5.0  # machine 0 gives up first, and says who is missing
PAUSE, READ_SECONDS = 0.2, 2.0  # between two attempts; for a line that has been begun


@dataclass(frozen=True)
class Machine:
    """What a host says of itself."""

    rank: int
    machines: int
    host: str
    version: str


def meet(rank: int, machines: int, address: str, port: int, seconds: float) -> list[str]:
    """Wait at most `seconds` until all machines have met at the address of machine 0. Returns the hosts, on machine 0.

    Raises UserError that names the machines that are missing or exist twice, or expect another number or version.
    """
    own, deadline = Machine(rank, machines, hostname(), __version__), time.monotonic() + seconds
    if rank == 0:
        return _serve(own, port, deadline, seconds)
    _ask(own, address, port, deadline, seconds)
    return []


def _serve(own: Machine, port: int, deadline: float, seconds: float) -> list[str]:
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=own.machines)
    except OSError as error:
        raise UserError(
            f"Machine 0 on {own.host} cannot listen on port {port} ({error.strerror}). If another program uses it, or "
            "another host also has --machine-rank 0, change that.",
            every_process=False,
        ) from None
    present = {0: own}
    verdict = ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        server.settimeout(PAUSE)
        guests: list[socket.socket] = []
        while len(present) < own.machines and not verdict:
            if time.monotonic() > deadline:
                missing = ranges(set(range(own.machines)) - present.keys())
                hosts = ", ".join(f"{each.rank} ({each.host})" for _, each in sorted(present.items()))
                verdict = f"{len(present)} of {own.machines} machines met within {seconds:.0f} s: {hosts}. "
                verdict += f"Missing: machine rank {missing}. Is its host up, and has each host its own --machine-rank?"
                break
            with contextlib.suppress(TimeoutError):
                guest = stack.enter_context(server.accept()[0])
                if (machine := _read_machine(guest)) is not None:
                    guests.append(guest)
                    verdict = _validate_machines(own, machine, present)
                    present.setdefault(machine.rank, machine)
        for guest in guests:
            _answer(guest, verdict)
    if verdict:
        raise UserError(verdict)
    return [present[rank].host for rank in range(own.machines)]


def _read_machine(guest: socket.socket) -> Machine | None:
    """What a host says of itself; None for a connection of another program, and for one that is lost."""
    guest.settimeout(READ_SECONDS)
    try:
        machine = Machine(**(json_object(_read_line(guest)) or {}))
    except (OSError, TypeError):
        return None
    texts = isinstance(machine.host, str) and isinstance(machine.version, str)
    return machine if texts and is_count(machine.rank) and is_count(machine.machines) else None


def _validate_machines(own: Machine, other: Machine, present: dict[int, Machine]) -> str:
    """What is wrong with a machine that has come; "" if nothing."""
    if other.version != own.version:
        return (
            f"The machines have different versions of accel-train: {own.version} on {own.host}, {other.version} on "
            f"{other.host}. Install the same one on all of them, and activate the same environment."
        )
    if other.machines != own.machines:
        return (
            f"Machine 0 on {own.host} expects {own.machines} machines, but machine {other.rank} on {other.host} "
            f"expects {other.machines}. Give all of them the same --num-machines."
        )
    if other.rank in present:
        return (
            f"Machine rank {other.rank} exists twice: {present[other.rank].host} and {other.host}. Give each host its "
            "own --machine-rank."
        )
    return ""


def _answer(guest: socket.socket, verdict: str) -> None:
    with contextlib.suppress(OSError):
        guest.sendall(verdict.encode() + b"\n")
        guest.settimeout(READ_SECONDS)
        guest.recv(1)  # the guest closes first, so that this port is free for the launcher at once


def _ask(own: Machine, address: str, port: int, deadline: float, seconds: float) -> None:
    reason = ""
    while True:
        try:
            with socket.create_connection((address, port), timeout=max(PAUSE, deadline - time.monotonic())) as server:
                server.sendall(json.dumps(asdict(own)).encode() + b"\n")
                server.settimeout(max(0.0, deadline - time.monotonic()) + VERDICT_SECONDS)
                answer = _read_line(server)
            break
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise UserError(
                f"Machine {own.rank} on {own.host} found nobody at {address}:{port} within {seconds:.0f} s ({reason}), "
                "where machine 0 should listen. Check that its host is up, that --main-process-ip is its name, and "
                "that no firewall blocks the port.",
                every_process=False,
            )
        time.sleep(PAUSE)
    if not answer.endswith(b"\n"):
        raise UserError(
            f"Machine 0 at {address}:{port} ended before all machines had met. Look for its own message.",
            every_process=False,
        )
    if text := answer.decode(errors="replace").strip():
        raise UserError(text)


def _read_line(connection: socket.socket) -> bytes:
    """What comes until the end of a line, of the connection, or of its time."""
    line = b""
    with contextlib.suppress(TimeoutError):
        while not line.endswith(b"\n") and len(line) < LONGEST and (piece := connection.recv(LONGEST)):
            line += piece
    return line
