"""The records of images that were looked at: an audit that was killed continues, and the next one looks at what is new.

A file to which records are appended. Each ends with a check value, so what a crash has left of one is noticed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel_train.audit.look import RECORD, Records
from accel_train.files import atomic_write, open_to_write
from accel_train.untrusted import MAX_LOG_BYTES, read_regular_file

SALT = np.uint64(0xACCE17A1_00000001)


class Kept:
    """The records in the file `path`; new ones are appended until `close`."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self.records = _read(path)
        # What a kill has left at the end would shift all that is appended.
        atomic_write(self.path, self.records.tobytes(), durable=False)
        self._stream = open_to_write(self.path, "ab")

    def of(self, names: npt.NDArray[np.uint64]) -> Records:
        """The records of these names (uint64 [n]), as far as there are any."""
        if not len(self.records):
            return self.records
        places = np.searchsorted(self.records["name"], names).clip(max=len(self.records) - 1)
        found: Records = self.records[places[self.records["name"][places] == names]]
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: they are looked at again
            self._stream.close()

    def append(self, records: Records) -> None:
        """Keep those of the records that have a state."""
        with contextlib.suppress(OSError):
            self._stream.write(_lasting(records))
            self._stream.flush()

    def replace(self, records: Records) -> None:
        """Keep these records alone: those of images that are not there any more go."""
        with contextlib.suppress(OSError):
            atomic_write(self.path, _lasting(records))


def _read(path: Path) -> Records:
    """The whole records of a file, sorted by name, of each name the last one. Empty if there is no such file."""
    try:
        data = read_regular_file(path, MAX_LOG_BYTES, follow=True)
    except OSError:
        return np.zeros(0, RECORD)
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    records = records[(_check_values(records) == records["check"]) & records["state"].any(1)]
    _, last = np.unique(records["name"][::-1], return_index=True)
    newest: Records = records[len(records) - 1 - last]
    return newest


def _lasting(records: Records) -> bytes:
    """The records that have a state, with their check values."""
    records = records[records["state"].any(1)]
    records["check"] = _check_values(records)
    return bytes(records.tobytes())


def _check_values(records: Records) -> npt.NDArray[np.uint64]:
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), RECORD.itemsize // 8)
    checks: npt.NDArray[np.uint64] = np.bitwise_xor.reduce(words[:, :-1], axis=1) ^ SALT
    return checks
