"""The run directory: its files have one writer and many readers, who never see a half-written file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_train.config.schema import Config, to_yaml
from accel_train.errors import print_line
from accel_train.files import atomic_write
from accel_train.ownership.folders import cannot_be_written, make_directory
from accel_train.ownership.lease import Lease
from accel_train.records.code import FOLDER, keep_code, references, remember_training
from accel_train.records.environment import environment
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.untrusted import MAX_LOG_BYTES, json_object, read_json_object, read_regular_file

DAMAGED = "metrics.damaged.jsonl"
MARKER = "REQUEUE"  # a file that asks the job script to start the run again
STATUS_SECONDS = 2.0  # status.json is not rewritten more often than this


class RunDirectory:
    """Writes config.yaml, model.json, environment.json, metrics.jsonl, status.json, starts.json and result.json.

    Before each write it checks that this start still owns the run, and raises LostError if not. A failed write (disk
    full, mount gone) does not end the run: it is counted in `failures`, and the first one is printed on stderr.
    """

    def __init__(self, path: Path, *, writes: bool, lease: Lease | None = None) -> None:
        """Create the folder. With `writes=False` (on all processes but the main one) every method does nothing.

        Raises UserError if the folder cannot be created or written to.
        """
        self.path = path
        self.writes = writes
        self.lease = lease or Lease(path, None)
        self.failures = 0
        self._status: dict[str, Any] = {}
        self._status_time = -math.inf
        if not writes:
            return
        make_directory(path)
        try:
            probe = path / f".write-test-{os.getpid()}"
            probe.touch()  # os.access() is wrong on network file systems and for root
            probe.unlink()
            _cut_torn_lines(self.metrics_path)
        except OSError as error:
            raise cannot_be_written(path, error) from error

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def finished(self) -> bool:
        """Whether the run is finished: result.json exists."""
        return (self.path / "result.json").is_file()

    def begin(
        self, config: Config, info: ModelInfo, *, world_size: int, devices: list[str], precision: str = "fp32"
    ) -> None:
        """Write config.yaml, model.json and environment.json. `devices`: the name of each process's device."""
        self._replace("config.yaml", to_yaml(config))
        self._replace(FILE, info.to_json())
        self._replace("environment.json", _json(environment(world_size, devices, precision), indent=2))

    def keep_code(self, config: Config, update: int) -> list[str]:
        """Keep the user's own code in code/ and code.json, and record who trains with it. Returns notes."""
        if not self.writes:
            return []
        notes = remember_training(config)
        if not references(config):
            return notes
        self._try(FOLDER, lambda: (self.path / FOLDER).mkdir(exist_ok=True))
        return keep_code(config, self.path, self._replace, update) + notes

    def log(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append {"kind": kind, "time": seconds since 1970, **values} to metrics.jsonl; return these values.

        Values may be plain Python, NumPy's or tensors. JSON has no NaN and no infinity: they become null.
        """
        plain: dict[str, Any] = _plain({"kind": kind, "time": round(time.time(), 3), **values})
        line = _json(plain) + "\n"

        def append() -> None:
            if self.failures:  # an earlier write may have left half a line
                _cut_torn_lines(self.metrics_path)
            with self.metrics_path.open("ab") as file:
                file.write(line.encode())

        self._try("metrics.jsonl", append)
        return plain

    def event(self, text: str, **values: Any) -> None:
        """Log an event, such as a resume, a quarantined checkpoint or a skipped update."""
        self.log("event", text=text, **values)

    def rewind(self, update: int, epochs: int | None = None, *, tests_again: bool = False) -> int:
        """Remove the lines of what will be done again from metrics.jsonl, and return the number of damaged lines.

        Removed are the train and eval lines after `update`; if `epochs` is given, also the eval lines of later epochs;
        with `tests_again`, also the test lines of `update` itself: the run was stopped within its final test. Damaged
        lines are moved to metrics.damaged.jsonl.
        """
        if not (self.writes and self.metrics_path.exists()):
            return 0
        kept, damaged = [], []
        for line in read_regular_file(self.metrics_path, MAX_LOG_BYTES, follow=True).splitlines(keepends=True):
            values = _values(line)
            if values is None:
                damaged.append(line)
            elif not _is_after(values, update, epochs, tests_again):
                kept.append(line)

        def move() -> None:
            with (self.path / DAMAGED).open("ab") as file:
                file.writelines(damaged)

        if damaged and not self._try(DAMAGED, move, fresh=True):
            return 0  # they stay in metrics.jsonl until they can be moved
        self._replace("metrics.jsonl", b"".join(kept), fresh=True)
        return len(damaged)

    def status(self, state: str, *, force: bool = False, **values: Any) -> None:
        """Rewrite status.json: state, time, pid, host, and the latest value of each name ever given.

        This happens at most every 2 seconds, unless the state changes or `force` is set.
        """
        is_new = state != self._status.get("state")
        self._status.update(values, state=state)
        now = time.monotonic()
        if not (is_new or force or now - self._status_time >= STATUS_SECONDS):
            return
        self._status_time = now
        self._status.update(time=round(time.time(), 3), pid=os.getpid(), host=platform.node())
        if self.failures:
            self._status["failed_writes"] = self.failures
        self._replace("status.json", _json(self._status, indent=2) + "\n")

    def starts(self, values: Mapping[str, Any]) -> None:
        """Rewrite starts.json, where the time of the run went."""
        self._replace("starts.json", _json(values) + "\n")

    def fail(self, reason: str) -> None:
        """Write into status.json that the run has failed. Any process and thread may call it, also if not `writes`."""
        if not self.lease.holds(fresh=True):
            return
        path = self.path / "status.json"
        with contextlib.suppress(OSError):
            status = read_json_object(path)
            status = status | {"state": "failed", "reason": reason, "time": round(time.time(), 3)}
            atomic_write(path, _json(status, indent=2) + "\n", durable=False)

    def result(self, values: Mapping[str, Any]) -> None:
        """Write result.json, which marks the run as finished."""
        self._replace("result.json", _json(values, indent=2) + "\n", durable=True, fresh=True)

    def ask_for_requeue(self, update: int) -> bool:
        """Write the file that asks the job script to start the run again. Returns whether it was written.

        `update`: of the checkpoint from which the run will resume.
        """
        failures = self.failures
        self._replace(MARKER, f"{update}\n", fresh=True)  # replaced, because a full disk would leave an empty file
        return self.failures == failures

    def _replace(self, name: str, content: str | bytes, *, durable: bool = False, fresh: bool = False) -> None:
        """The file is the old one or the new one at any moment, whole. `fresh`: see `owner.Lease.holds`."""
        self._try(name, lambda: atomic_write(self.path / name, content, durable=durable), fresh=fresh)

    def _try(self, name: str, write: Callable[[], None], *, fresh: bool = False) -> bool:
        """Call `write` and return whether it succeeded. `fresh`: see `Lease.holds`."""
        if not self.writes:
            return False
        self.lease.check(fresh=fresh)
        try:
            write()
            return True
        except OSError as error:
            self.failures += 1
            if self.failures == 1:
                print_line(
                    f"accel-train: warning: {self.path / name} cannot be written ({error.strerror}); "
                    "training goes on, but its records are incomplete.",
                    sys.stderr,
                )
            return False


def remove_requeue_marker(run: Path) -> None:
    """Remove the file with which an earlier start asked to be started again."""
    with contextlib.suppress(OSError):  # the directory of a finished run may be read-only
        (run / MARKER).unlink()


def _cut_torn_lines(path: Path) -> None:
    """Cut off the incomplete last lines that a killed writer or a failed write left in a JSON-lines file."""
    if not path.exists():
        return
    content = read_regular_file(path, MAX_LOG_BYTES, follow=True)
    with path.open("r+b") as file:
        end = len(content)
        while end:
            start = content.rfind(b"\n", 0, end - 1) + 1
            if content[end - 1 : end] == b"\n" and json_object(content[start:end]) is not None:
                break
            end = start
        file.truncate(end)


def _values(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics.jsonl, or None if this program cannot have written it."""
    values = json_object(line)
    if values is None or not line.endswith(b"\n") or not isinstance(values.get("kind"), str):
        return None
    return values if all(isinstance(values.get(name, 0), int) for name in ("epoch", "update")) else None


def _is_after(line: dict[str, Any], update: int, epochs: int | None, tests_again: bool) -> bool:
    if tests_again and line["kind"] == "eval" and line.get("split") == "test" and line.get("update", 0) >= update:
        return True
    if line["kind"] == "eval" and epochs is not None and line.get("epoch", 0) > epochs:
        return True
    return line["kind"] in ("train", "eval") and line.get("update", 0) > update


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """Return `value` made of the types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, or a number or an array of NumPy's
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)
