"""The files of `accel-train shards`: each shard is complete or absent, and a journal says which ones are complete.

The journal is a hidden file with a line for each shard. After a kill the next start goes on behind the last one. When
all shards have been read back, the journal gets another name: until then nobody trains on them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from accel_train.data.all_cores import on_all_cores
from accel_train.data.sources.files.tars import END
from accel_train.data.sources.files.webdataset import UNFINISHED
from accel_train.errors import LOGGER, UserError
from accel_train.files import atomic_write, fsync, sha256
from accel_train.untrusted import MAX_LOG_BYTES, read_regular_file

FINISHED = ".accel-train-shards"
"""What the journal is called when all shards are complete."""
INFO, SUMS = "_info.json", "SHA256SUMS"


@dataclass(frozen=True)
class Shard:
    """A complete shard, a line of the journal."""

    name: str
    split: str
    images: int
    bytes: int
    sha256: str


@contextlib.contextmanager
def locked(lock: Path, output: str, advice: str = "") -> Iterator[None]:
    """Hold the file `lock`, which is removed at the end. Its folder is created.

    Raises UserError about `output` if another process holds it, and for an OSError of the block; `advice` follows then.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{output}: another process is writing it.") from None
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror or error}.{advice}") from error


def begin(output: Path, fingerprint: str) -> tuple[list[Shard], bool]:
    """The shards that an earlier start has completed, and whether these are all. Raises UserError and OSError."""
    unfinished, finished = output / UNFINISHED, output / FINISHED
    journal = next((path for path in (unfinished, finished) if path.exists()), None)
    if journal is None:
        there = sorted(path.name for path in output.iterdir() if path.name != f"{FINISHED}.lock")
        if there:
            raise UserError(f"{output} is not empty (found {there[0]}); name a new or an empty folder.")
        atomic_write(unfinished, f"{fingerprint}\n")
        return [], False
    first, *lines = read_regular_file(journal, MAX_LOG_BYTES, follow=True).decode().splitlines()
    if first != fingerprint and journal == unfinished and not lines:  # nothing was written: an image was unreadable
        atomic_write(unfinished, f"{fingerprint}\n")
        return [], False
    if first != fingerprint:
        raise UserError(f"{output} has shards of other images or settings; delete it or name another folder.")
    shards: list[Shard] = []
    with contextlib.suppress(ValueError, TypeError, OSError):  # a line that was not written to its end; no such file
        for line in lines:
            shard = Shard(**json.loads(line))
            if (output / shard.name).stat().st_size != shard.bytes:
                break
            shards.append(shard)
    if journal == finished and len(shards) == len(lines) and all((output / name).exists() for name in (INFO, SUMS)):
        return shards, True
    atomic_write(unfinished, "".join([f"{fingerprint}\n", *map(_line, shards)]))
    finished.unlink(missing_ok=True)
    if shards:
        LOGGER.info(f"Continuing after {sum(shard.images for shard in shards):,} images.")
    return shards, False


def _line(shard: Shard) -> str:
    return json.dumps(asdict(shard)) + "\n"


class ShardWriter:
    """Writes samples one after the other into shards; `shards` are the complete ones."""

    def __init__(self, output: Path, shards: list[Shard], most_bytes: int, most_images: int | None) -> None:
        self.output, self.shards, self.most_bytes, self.most_images = output, shards, most_bytes, most_images
        self.partial = output / ".shard.partial"
        self.split, self.images, self.size, self.digest = "", 0, 0, hashlib.sha256()

    def __enter__(self) -> ShardWriter:
        self.file = self.partial.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # to close it writes what is buffered, which a full disk refuses again
            self.file.close()
        self.partial.unlink(missing_ok=True)

    def add(self, split: str, sample: bytes) -> None:
        """Raises OSError."""
        full = self.size + len(sample) + len(END) > self.most_bytes or self.images == self.most_images
        if self.images and (full or split != self.split):
            self.complete()
        self.split, self.images = split, self.images + 1
        self._put(sample)

    def _put(self, content: bytes) -> None:
        self.file.write(content)
        self.digest.update(content)
        self.size += len(content)

    def complete(self) -> None:
        """End the shard: the disk has it before it gets its name, and then the journal its line. Raises OSError."""
        if not self.images:
            return
        self._put(END)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        number = sum(shard.split == self.split for shard in self.shards)
        name = f"{self.split}-{number:06}.tar"
        self.shards.append(Shard(name, self.split, self.images, self.size, self.digest.hexdigest()))
        self.partial.replace(self.output / name)
        fsync(self.output)
        with (self.output / UNFINISHED).open("a", encoding="utf-8") as journal:
            journal.write(_line(self.shards[-1]))
            journal.flush()
            os.fsync(journal.fileno())
        self.images, self.size, self.digest, self.file = 0, 0, hashlib.sha256(), self.partial.open("wb")


def finish(output: Path, shards: list[Shard], classes: tuple[str, ...]) -> None:
    """Write what is known of all shards, read them back, and give the journal its last name.

    Raises UserError and OSError.
    """
    splits = {}
    for split, group in itertools.groupby(shards, lambda shard: shard.split):
        own = list(group)
        lengths = [shard.images for shard in own]
        splits[split] = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": [shard.name for shard in own],
            "shard_lengths": lengths,
        }
    atomic_write(output / INFO, json.dumps({"splits": splits, "classes": classes}, indent=1) + "\n")
    atomic_write(output / SUMS, "".join(f"{shard.sha256}  {shard.name}\n" for shard in shards))
    paths = [output / shard.name for shard in shards]
    for shard, path, found in zip(shards, paths, on_all_cores(sha256, paths), strict=True):
        if found != shard.sha256:
            path.unlink(missing_ok=True)
            raise UserError(
                f"{path} differs from what was written, and was removed. Check the disk; then the same command writes "
                "it again."
            )
    (output / UNFINISHED).replace(output / FINISHED)
    fsync(output)
