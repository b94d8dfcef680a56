"""Collectives while the processes connect, and how long they may take."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch import distributed

from accel_train.errors import UserError, reason_of
from accel_train.launch.process import hostname


@contextlib.contextmanager
def connecting() -> Iterator[None]:
    """Turn gloo's errors while it creates a group, and connects all processes with each other, into a UserError.

    gloo listens at the address to which this host resolves its own name. The other hosts may be unable to reach it.
    """
    try:
        yield
    except RuntimeError as error:
        absent = isinstance(error, distributed.DistStoreError)  # the address of another one did not come in time
        if not absent and "gloo" not in str(error).lower():
            raise
        if absent:
            raise UserError(
                f"{hostname()} did not learn in time where another process listens ({reason_of(error, 200)}). That "
                "process has failed (see its message) or cannot listen. Set GLOO_SOCKET_IFNAME on all nodes to the "
                "interface that they share.",
                every_process=False,
            ) from error
        try:
            address = socket.gethostbyname(socket.gethostname())
        except OSError:
            address = "no address"
        raise UserError(
            f"The processes cannot connect to each other ({hostname()}: {reason_of(error, 200)}). Each listens at the "
            f"address of its host's name, here {address}. Set GLOO_SOCKET_IFNAME on all nodes to the interface "
            "that they share.",
            every_process=False,
        ) from error


def collective_seconds(limit: float) -> float:
    """The time-out of collectives where the watchdog ends a hang after `limit` seconds (0: never); it comes first."""
    return limit + 60 if limit else timedelta(days=365).total_seconds()
