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
from accel_train.ownership.folders import cannot_be_written, make_directory
from accel_train.ownership.lease import Lease, LostError
from accel_train.records.code import FOLDER, keep_code, references, remember_training
from accel_train.records.environment import environment
from accel_train.records.metrics_log import MetricsLog
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.untrusted import read_json_object

DAMAGED = "metrics.damaged.jsonl"
MARKER = "REQUEUE"  # a file that asks the job script to start the run again
STATUS_SECONDS = 2.0  # status.json is not rewritten more often than this


class RunDirectory:
    """Writes config.yaml, model.json, environment.json, metrics.jsonl, status.json, starts.json and result.json.

    Before each write it checks that this start still owns the run, and raises LostError if not. A failed write (disk
    full, mount gone) does not end the run: it is counted in `failures`, and the first one is printed on stderr. Lines
    of metrics.jsonl that cannot be written are written later.
    """

    def __init__(self, path: Path, *, writes: bool, lease: Lease | None = None) -> None:
        """Create the folder. With `writes=False` (on all processes but the main one) every method does nothing.

        Raises UserError if the folder cannot be created or written to.
        """
        self.path = path
        self.writes = writes
        self.lease = lease or Lease(path, None)
        self.failures = 0
        self._metrics = MetricsLog(self.metrics_path, self.lease)
        self._status: dict[str, Any] = {}
        self._status_time = -math.inf
        if not writes:
            return
        make_directory(path)
        try:
            probe = path / f".write-test-{os.getpid()}"
            probe.touch()  # os.access() is wrong on network file systems and for root
            probe.unlink()
            self._metrics.cut_torn_lines()
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
        self, config: Config, info: ModelInfo, *, world_size: int, devices: list[str], precision: str = "fp32",
        update: int = 0,
    ) -> None:  # fmt: skip
        """Write config.yaml, model.json and environment.json. `devices`: the name of each process's device; `update`:
        from which this start trains on."""
        self._try("generations", lambda: self.lease.begin(update))
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
        plain: dict[str, Any] = _plain({"kind": kind, "time": round(time.time(), 3), **values, **self._generation})
        self._try("metrics.jsonl", lambda: self._metrics.append(_json(plain) + "\n"))
        return plain

    def event(self, text: str, **values: Any) -> None:
        """Log an event, such as a resume, a quarantined checkpoint or a skipped update."""
        self.log("event", text=text, **values)

    def rewind(self, update: int, epochs: int | None = None, *, tests_again: bool = False) -> int:
        """Remove the lines of what will be done again from metrics.jsonl, and return the number of damaged lines.

        `tests_again`: the run was stopped within its final test. See `MetricsLog.without`. Damaged lines are moved to
        metrics.damaged.jsonl.
        """
        if not (self.writes and self.metrics_path.exists()):
            return 0
        kept, damaged = self._metrics.without(update, epochs, tests_again=tests_again)

        def move() -> None:
            with (self.path / DAMAGED).open("ab") as file:
                file.writelines(damaged)

        if damaged and not self._try(DAMAGED, move):
            return 0  # they stay in metrics.jsonl until they can be moved
        self._replace("metrics.jsonl", kept)  # always: an earlier owner may have the old file open, see lease.py
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
        if self._metrics.waiting:
            self._try("metrics.jsonl", self._metrics.write_waiting)
        self._status.update(time=round(time.time(), 3), pid=os.getpid(), host=platform.node(), **self._generation)
        if self.failures:
            self._status["failed_writes"] = self.failures
        self._replace("status.json", _json(self._status, indent=2) + "\n")

    def starts(self, values: Mapping[str, Any]) -> None:
        """Rewrite starts.json, where the time of the run went."""
        self._replace("starts.json", _json(values) + "\n")

    def fail(self, reason: str) -> None:
        """Write into status.json that the run has failed. Any process and thread may call it, also if not `writes`."""
        path = self.path / "status.json"
        with contextlib.suppress(OSError, LostError):
            status = read_json_object(path)
            status = status | {"state": "failed", "reason": reason, "time": round(time.time(), 3)}
            self.lease.write(path, _json(status, indent=2) + "\n", durable=False)

    def result(self, values: Mapping[str, Any]) -> bool:
        """Write result.json, which marks the run as finished. Returns False if it cannot be written.

        It says how many lines metrics.jsonl lacks, if any.
        """
        if self._metrics.waiting:
            self._try("metrics.jsonl", self._metrics.write_waiting)
        missing = self._metrics.missing + self._metrics.waiting
        lacks = {"missing_log_lines": missing} if missing else {}
        text = _json({**values, **self._generation, **lacks}, indent=2) + "\n"
        return self._replace("result.json", text, durable=True)

    def ask_for_requeue(self, update: int) -> bool:
        """Write the file that asks the job script to start the run again. Returns whether it was written.

        `update`: of the checkpoint from which the run will resume.
        """
        return self._replace(MARKER, f"{update}\n")  # replaced: a full disk would leave an empty file

    @property
    def _generation(self) -> dict[str, int]:
        """What each record says of the owner that wrote it; see ownership/generation.py."""
        return {"generation": self.lease.generation} if self.lease.generation else {}

    def _replace(self, name: str, content: str | bytes, *, durable: bool = False) -> bool:
        """The file is the old one or the new one at any moment, whole."""
        return self._try(name, lambda: self.lease.write(self.path / name, content, durable=durable))

    def _try(self, name: str, write: Callable[[], None]) -> bool:
        """Call `write`, if this process writes, and return whether nothing failed."""
        if not self.writes:
            return True
        self.lease.check()
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
