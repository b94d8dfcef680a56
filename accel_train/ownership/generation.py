"""The number of a run's owners so far: a start that slept through a whole other start sees that it has a successor.

Each owner gets the next number, by creating generations/00000003.json exclusively, which is atomic on NFS, too, and
needs no hard links. When it begins to train it writes into the file from which update, and the file stays when it
releases the run. Everything that an owner writes names its generation. So readers can leave out what an owner wrote
after a later one had begun: a checkpoint or a result that is late.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_train.files import open_to_write
from accel_train.untrusted import is_count, read_json_object

FOLDER = "generations"


def claim_next(directory: Path) -> int:
    """Begin the next generation of the run in `directory`; return its number. Raises OSError.

    The number is also higher than those in status.json and result.json: somebody may have copied them alone.
    """
    (directory / FOLDER).mkdir(exist_ok=True)
    copied = [generation_of(read_json_object(directory / name)) for name in ("status.json", "result.json")]
    while True:
        number = max([*_numbers(directory), *copied, 0]) + 1
        with contextlib.suppress(FileExistsError):
            open_to_write(_file(directory, number), "xb").close()
            return number


def begin(directory: Path, number: int, update: int, write: Callable[[Path, str], None]) -> None:
    """Record with `write` that the owner `number` trains from `update` on. Earlier records are no longer needed."""
    write(_file(directory, number), json.dumps({"generation": number, "update": update}) + "\n")
    for earlier in _numbers(directory):
        if earlier < number:
            with contextlib.suppress(OSError):
                _file(directory, earlier).unlink()


def give_back(directory: Path, number: int) -> None:
    """Remove the generation of an owner that has not begun to train, and the folder if it is empty."""
    with contextlib.suppress(OSError):
        if not _file(directory, number).stat().st_size:
            _file(directory, number).unlink()
        (directory / FOLDER).rmdir()


def last_begun(directory: Path) -> tuple[int, int]:
    """The newest generation that has begun to train, and the update from which; (0, 0) if none has. Raises OSError."""
    for number in sorted(_numbers(directory), reverse=True):
        record = read_json_object(_file(directory, number))
        if is_count(record.get("update")):
            return number, int(record["update"])
    return 0, 0


def generation_of(record: Mapping[str, Any]) -> int:
    """The generation that a record of a run names, from 1; 0 if it names none."""
    number = record.get("generation", 0)
    return number if is_count(number) else 0


def is_late(directory: Path, record: Mapping[str, Any], update: int | None = None) -> bool:
    """Whether an earlier owner wrote `record` after a later one had begun to train the run in `directory`.

    `update`: of a checkpoint. One that the later owner may have begun from is not late. Without it `record` is a
    result: the later owner has renamed an earlier one before it began. Raises OSError.
    """
    number, began_at = last_begun(directory)
    return 0 < generation_of(record) < number and (update is None or update > began_at)


def read_result(run: Path) -> dict[str, Any]:
    """The content of the result of the run in the folder `run`; {} if it is not finished, or its result is damaged.

    A late result is none. Raises OSError.
    """
    result = read_json_object(run / "result.json")
    return {} if is_late(run, result) else result


def _numbers(directory: Path) -> list[int]:
    try:
        stems = [path.stem for path in (directory / FOLDER).iterdir() if path.suffix == ".json"]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(stem) for stem in stems if stem.isascii() and stem.isdigit()]


def _file(directory: Path, number: int) -> Path:
    return directory / FOLDER / f"{number:08d}.json"
