"""metrics.jsonl: one line of JSON for each record of a run. Lines that cannot be written now are written later."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from accel_train.ownership.lease import Lease
from accel_train.untrusted import MAX_LOG_BYTES, json_object, log_lines, read_regular_file

MOST_WAITING = 20_000  # lines: some 5 MB


class MetricsLog:
    """The log of a run, for its owner. Its methods raise LostError if another start has taken over the run."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.path, self.lease = path, lease
        self.missing = 0
        """Lines that will never be written, because too many others waited."""
        self._waiting: deque[bytes] = deque()

    @property
    def waiting(self) -> int:
        """The number of lines that could not be written yet."""
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Write a line, after those that wait. If that fails, it waits, too. Raises OSError."""
        if len(self._waiting) == MOST_WAITING:
            self._waiting.popleft()
            self.missing += 1
        self._waiting.append(line.encode())
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the lines that wait. Raises OSError."""
        while self._waiting:
            self.lease.append(self.path, self._waiting[0])
            self._waiting.popleft()

    def cut_torn_lines(self) -> None:
        """Cut off the incomplete last lines that a killed writer left. Raises OSError."""
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            self.lease.check()  # after opening, as in Lease.append
            content = read_regular_file(self.path, MAX_LOG_BYTES, follow=True)
            end = len(content)
            while end:
                start = content.rfind(b"\n", 0, end - 1) + 1
                if content[end - 1 : end] == b"\n" and json_object(content[start:end]) is not None:
                    break
                end = start
            if end != len(content):
                file.truncate(end)

    def without(self, update: int, epochs: int | None, *, tests_again: bool) -> tuple[bytes, list[bytes]]:
        """Return the log's content without what will be done again, and the damaged lines, which it does not have.

        Left out are the train and eval lines after `update`; if `epochs` is given, also the eval lines of later epochs;
        with `tests_again`, also the test lines of `update` itself; of lines that wait, too. Raises OSError.
        """
        kept, damaged = [], []
        content = read_regular_file(self.path, MAX_LOG_BYTES, follow=True)
        for line in log_lines(content.splitlines(keepends=True)):
            values = _values(line)
            if values is None:
                damaged.append(line)
            elif not _is_after(values, update, epochs, tests_again):
                kept.append(line)
        waiting = [line for line in self._waiting if not _is_after(_values(line) or {}, update, epochs, tests_again)]
        self._waiting = deque(waiting)
        return b"".join(kept), damaged


def _values(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics.jsonl, or None if this program cannot have written it."""
    values = json_object(line)
    if values is None or not line.endswith(b"\n") or not isinstance(values.get("kind"), str):
        return None
    return values if all(isinstance(values.get(name, 0), int) for name in ("epoch", "update")) else None


def _is_after(line: dict[str, Any], update: int, epochs: int | None, tests_again: bool) -> bool:
    kind = line.get("kind")
    if tests_again and kind == "eval" and line.get("split") == "test" and line.get("update", 0) >= update:
        return True
    if kind == "eval" and epochs is not None and line.get("epoch", 0) > epochs:
        return True
    return kind in ("train", "eval") and line.get("update", 0) > update
