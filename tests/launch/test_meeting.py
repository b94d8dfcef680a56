"""The hosts meet before their launchers: who is missing, or exists twice, is named within the option's time."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import helpers
import pytest

from accel_train.cli.dispatch import main
from accel_train.errors import UserError
from accel_train.launch import meeting
from accel_train.launch.meeting import meet


def all_meet(ranks: Sequence[int], machines: Sequence[int] | None = None, seconds: float = 20) -> list[str]:
    """What each machine gets: its hosts, or its error."""
    port = int(helpers.free_port())

    def one(index: int) -> str:
        try:
            return " ".join(
                meet(ranks[index], (machines or [len(ranks)] * len(ranks))[index], "localhost", port, seconds)
            )
        except UserError as error:
            return f"error: {error}"

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_all_machines_meet_and_leave_the_port_free() -> None:
    assert all_meet([2, 0, 1])[1] == " ".join([meeting.hostname()] * 3)
    assert all_meet([0]) == [meeting.hostname()]
    port = int(helpers.free_port())
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda rank: meet(rank, 2, "127.0.0.1", port, 20), range(2)))) == 2
    with socket.socket() as launcher:  # which may not set SO_REUSEADDR
        launcher.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("ranks", "machines", "words"),
    [
        ([0, 2], [3, 3], "2 of 3 machines met within 1 s"),
        ([0, 1, 1], [3, 3, 3], "Machine rank 1 exists twice"),
        ([0, 1], [2, 3], "expects 2 machines, but machine 1 on"),
    ],
)
def test_what_is_wrong_is_said_in_time_on_all(ranks: list[int], machines: list[int], words: str) -> None:
    began = time.monotonic()
    found = all_meet(ranks, machines, seconds=1)
    assert words in found[0] and all(text.startswith("error: ") for text in found)
    assert found[1] == found[0] and time.monotonic() - began < 8
    assert "Missing: machine rank 1." in found[0] or "Missing" not in words


def test_nobody_listens_and_another_program_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "found nobody at localhost:" in all_meet([1], [2], seconds=0.5)[0]
    port = int(helpers.free_port())
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        meet(0, 2, "localhost", port, 1)
    port = int(helpers.free_port())
    monkeypatch.setattr(meeting, "READ_SECONDS", 0.3)
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(meet, 0, 2, "localhost", port, 20)
        for sent in (
            b"GET / HTTP/1.1\n",
            b'{"rank": "x"}\n',
            b"",
            b'{"rank": -1, "machines": 2, "host": "", "version": ""}\n',
        ):
            while True:
                try:
                    with socket.create_connection(("localhost", port)) as stranger:
                        stranger.sendall(sent)
                        if not sent:  # it is gone at once, with a reset
                            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        assert meet(1, 2, "localhost", port, 20) == []
        assert len(host.result()) == 2


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "2.0"])
    real = meeting.Machine
    monkeypatch.setattr(
        meeting,
        "Machine",
        lambda rank, machines, host, version: real(
            rank, machines, host, version if isinstance(version, str) and version in ("1.0", "2.0") else next(versions)
        ),
    )
    found = all_meet([0, 1])
    assert all("different versions of accel-train" in text for text in found), found


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    port = helpers.free_port()
    line = ["meet", "digits", "--num-machines", "2", "--main-process-ip", "localhost", "--main-process-port", port]
    began = time.monotonic()
    assert main([*line, "--rendezvous-timeout-seconds", "1"]) == 2 and time.monotonic() - began < 5
    found = capsys.readouterr().err
    assert found.count("\n") == 1 and "Missing: machine rank 1" in found
    assert main([*line, "--machine-rank", "2"]) == 2 and "expected 0 to 1" in capsys.readouterr().err
    assert main(["meet", "--main-process-port", port]) == 0 and "1 machines met" in capsys.readouterr().out
