"""The run directory: its files have one writer and many readers, who never see a half-written file.

What made a run, the user's own code and the environment (versions, devices, launcher), comes first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train.checkpoint.directory import PACKAGES, versions
from accel_train.config.schema import Config, to_yaml, value
from accel_train.errors import UserError, print_line
from accel_train.files import (
    MAX_LOG_BYTES,
    NotRegularFileError,
    atomic_write,
    json_object,
    log_lines,
    open_to_write,
    read_json_object,
    read_regular_file,
    sha256,
)
from accel_train.launch.process import MARKER, RUN, job_id, start_folder, tell_job_script
from accel_train.ownership.claim import cannot_be_written, make_directory
from accel_train.ownership.owner import Lease, LostError
from accel_train.records.model_info import FILE, ModelInfo
from accel_train.user_code import (
    FOLDER,
    OBJECT,
    PREFIXES,
    Reference,
    code_file,
    keep_code,
    metric_name,
    parse_reference,
    texts_of,
)


def references(config: Config) -> dict[str, Reference]:
    """Return the options of `config` that name a user's code: "model.name" -> its Reference.

    A metric has the key of `metric_key`.
    """
    found = {}
    for option in PREFIXES:
        for text in texts_of(value(config, option)):
            if (reference := parse_reference(option, text)) is not None:
                found[option if option != "metrics" else metric_key(text)] = reference
    return found


def metric_key(text: str) -> str:
    """Return the key of a metric of --metrics in code.json: "metrics:auc"."""
    return f"metrics:{metric_name(text)}"


def code_facts(config: Config) -> dict[str, str]:
    """Return what is equal on processes that have the same code: the hashes of the user's files as one text, and the
    hash of the weights of a model object."""
    used = references(config)
    files = {option: code_file(reference) for option, reference in used.items()}
    hashes = " ".join(f"{option} {sha256(path)}" for option, path in files.items() if path is not None)
    if OBJECT not in {reference.module for reference in used.values()}:
        return {"code": hashes}
    from accel_train.user_code import weights_hash

    return {"code": hashes, "the weights of the model (give a function that makes it)": weights_hash()}


LAUNCHER = {
    "": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS MKL_NUM_THREADS "
        "CUDA_VISIBLE_DEVICES CUBLAS_WORKSPACE_CONFIG PYTORCH_ALLOC_CONF NVIDIA_TF32_OVERRIDE GLOO_SOCKET_IFNAME "
        "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT PBS_JOBID",
    "ACCELERATE_": "USE_CPU MIXED_PRECISION NUM_PROCESSES USE_FSDP DYNAMO_BACKEND DYNAMO_MODE",
    "FSDP_": "VERSION RESHARD_AFTER_FORWARD OFFLOAD_PARAMS AUTO_WRAP_POLICY",
    "NCCL_": "DEBUG SOCKET_IFNAME IB_DISABLE IB_HCA P2P_DISABLE ALGO PROTO",
    "SLURM_": "JOB_ID JOB_PARTITION JOB_NODELIST ARRAY_JOB_ID ARRAY_TASK_ID RESTART_COUNT NTASKS CPUS_PER_TASK",
}  # fmt: skip
"""The variables that say how a run was started, or change its numbers or its speed: prefix -> the rest of their names.

Only these are recorded. Any other one may be a secret, whatever its name: a run's folder is given away.
"""


def environment(world_size: int, devices: list[str], precision: str = "fp32") -> dict[str, Any]:
    """Return the versions, devices, precision, host, launcher and command line of a run. Imports torch."""
    import torch

    packages = versions((*PACKAGES, "numpy", "pillow", "simplejpeg"), missing="not installed")
    python = packages.pop("python")
    packages["torch"] = torch.__version__  # with its build: +cpu, +cu130
    names = sorted(prefix + name for prefix, rest in LAUNCHER.items() for name in rest.split())
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": python,
        "packages": packages,
        "cuda": torch.version.cuda,
        "world_size": world_size,
        "devices": devices,
        "precision": precision,
        "cores": os.cpu_count(),
        "launcher": {name: os.environ[name] for name in names if name in os.environ},
    }


STATUS_SECONDS = 2.0  # status.json is not rewritten more often than this


class RunDirectory:
    """Writes config.yaml, metrics.jsonl and the files model, data, environment, status, starts and result (.json).

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
            open_to_write(probe, "wb").close()  # os.access() is wrong on network file systems and for root
            probe.unlink()
            self._metrics.cut_torn_lines()
        except NotRegularFileError as error:
            raise UserError(
                f"--output-dir: {error}: accel-train did not write that. Remove it, or give another folder."
            ) from None
        except OSError as error:
            raise cannot_be_written(path, error) from error

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def begin(
        self, config: Config, info: ModelInfo, around: Mapping[str, Any], data: Mapping[str, Any], update: int = 0
    ) -> None:
        """Write config.yaml, model.json, environment.json and data.json. `around`: see `environment`;
        `data`: see `summary.data_record`; `update`: from which this start trains on."""
        self._try("generations", lambda: self.lease.begin(update))
        self._replace("config.yaml", to_yaml(config))
        self._replace(FILE, info.to_json())
        self._replace("environment.json", _json(around, indent=2))
        self._replace("data.json", _json(data) + "\n")

    def keep_code(self, config: Config, update: int) -> list[str]:
        """Keep the user's own code in code/ and code.json. Returns notes about what has changed."""
        used = references(config)
        if not (self.writes and used):
            return []
        self._try(FOLDER, lambda: (self.path / FOLDER).mkdir(exist_ok=True))
        return keep_code(used, self.path, self._replace, update)

    def log(self, kind: str, **values: Any) -> dict[str, Any]:
        """Append {"kind": kind, "time": seconds since 1970, **values} to metrics.jsonl; return these values.

        Values may be plain Python, NumPy's or tensors. JSON has no NaN and no infinity: they become null.
        """
        line: dict[str, Any] = plain({"kind": kind, "time": round(time.time(), 3), **values, **self._generation})
        self._try("metrics.jsonl", lambda: self._metrics.append(_json(line) + "\n"))
        return line

    def remove_lines_after(self, update: int, evaluated: bool = True, *, tests_again: bool = False) -> None:
        """Remove the lines of what will be done again from metrics.jsonl.

        `tests_again`: the run was stopped within its final test. See `MetricsLog.without`.
        """
        if self.writes and self.metrics_path.exists():
            kept = self._metrics.without(update, evaluated, tests_again=tests_again)
            # Always: an earlier owner may have the old file open, see ownership/owner.py.
            self._try("metrics.jsonl", lambda: self._metrics.replace(kept))

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
        lacks = {"missing_log_lines": self._metrics.waiting} if self._metrics.waiting else {}
        text = _json({**values, **self._generation, **lacks}, indent=2) + "\n"
        return self._replace("result.json", text, durable=True)

    def ask_for_requeue(self, update: int) -> bool:
        """Write the file that asks the job script to start the run again. Returns whether it was written.

        `update`: of the checkpoint from which the run will resume.
        """
        if self.writes:
            tell_job_script(MARKER, update)  # in the folder of this start, which no other has
        return self._replace(MARKER, f"{update}\n")  # replaced: a full disk would leave an empty file

    @property
    def _generation(self) -> dict[str, int]:
        """What each record says of the owner that wrote it; see ownership/owner.py."""
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


def begin_start(run: Path) -> None:
    """Remove the file with which an earlier start asked to be started again, and note which job trains the run now."""
    with contextlib.suppress(OSError):  # the directory of a finished run may be read-only
        (run / MARKER).unlink()
    if start_folder() is None:
        return
    tell_job_script(RUN, run.absolute())
    with contextlib.suppress(OSError):
        folder = run / "slurm"
        if folder.is_symlink():  # the run may be somebody else's: nothing is written where a link leads
            folder.unlink()
        folder.mkdir(exist_ok=True)
        atomic_write(folder / "job", job_id() + "\n", durable=False)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """Return `value` made of the types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, or a number or an array of NumPy's
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


class MetricsLog:
    """metrics.jsonl: one line of JSON for each record of a run. Lines that cannot be written now are written later.

    It is for the run's owner: its methods raise LostError if another start has taken over the run."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.path, self.lease = path, lease
        self._waiting: deque[bytes] = deque()
        self._content: bytes | None = None
        """What the file is to hold before the next line, if it could not be replaced yet."""

    @property
    def waiting(self) -> int:
        """The number of lines that could not be written yet."""
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Write a line, after those that wait. If that fails, it waits, too. Raises OSError."""
        self._waiting.append(line.encode())
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the lines that wait. Raises OSError."""
        if self._content is not None:  # else what is done again would be there twice
            self.replace(self._content)
        while self._waiting:
            self.lease.append(self.path, self._waiting[0])
            self._waiting.popleft()

    def replace(self, content: bytes) -> None:
        """Replace the file. If that fails, new lines wait until it is done. Raises OSError."""
        self._content = content
        self.lease.write(self.path, content, durable=False)
        self._content = None

    def _read(self) -> bytes:
        if self._content is not None:
            return self._content
        return read_regular_file(self.path, MAX_LOG_BYTES, follow=True)

    def cut_torn_lines(self) -> None:
        """Cut off the incomplete last lines that a killed writer left. Raises OSError."""
        if not self.path.exists():
            return
        with open_to_write(self.path, "r+b") as file:
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

    def without(self, update: int, evaluated: bool, *, tests_again: bool) -> bytes:
        """Return the log's content without what will be done again. Damaged lines, which readers leave out, stay in it.

        Left out are the train and eval lines after `update`; unless what follows it is `evaluated`, also its own eval
        lines; with `tests_again`, also its own test lines; of lines that wait, too. Raises OSError.
        """

        def is_kept(line: bytes) -> bool:
            return not _is_after(_values(line) or {}, update, evaluated, tests_again)

        self._waiting = deque(line for line in self._waiting if is_kept(line))
        return b"".join(line for line in log_lines(self._read().splitlines(keepends=True)) if is_kept(line))


def _values(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics.jsonl, or None if this program cannot have written it."""
    values = json_object(line)
    if values is None or not line.endswith(b"\n") or not isinstance(values.get("kind"), str):
        return None
    return values if all(isinstance(values.get(name, 0), int) for name in ("epoch", "update")) else None


def _is_after(line: dict[str, Any], update: int, evaluated: bool, tests_again: bool) -> bool:
    kind = line.get("kind")
    if tests_again and kind == "eval" and line.get("split") == "test" and line.get("update", 0) >= update:
        return True
    if kind == "eval" and not evaluated and line.get("update", 0) == update:
        return True
    return kind in ("train", "eval") and line.get("update", 0) > update
