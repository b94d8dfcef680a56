"""Files that are replaced atomically: a reader sees the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

from accel_train.errors import writing
from accel_train.untrusted import open_regular_file, open_to_read

WRITING = {
    "wb": os.O_WRONLY | os.O_CREAT,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "r+b": os.O_RDWR,
}
"""The modes of open() for writing -> flags of os.open. A file is cut to nothing only after it was checked."""


def open_to_write(path: Path, mode: Literal["wb", "xb", "ab", "r+b"], *, buffering: int = -1) -> IO[bytes]:
    """Open a file for writing, as open() does, but never the file to which a link in its place leads.

    All that is written in a run's folder, which may be somebody else's, is opened here: a link could lead to any file
    of the user. The folders above may be links, as where checkpoints are kept on another disk. Raises OSError, and
    NotRegularFileError for a link or a pipe.
    """
    descriptor = open_regular_file(path, flags=WRITING[mode])
    if mode == "wb":
        os.ftruncate(descriptor, 0)
    return os.fdopen(descriptor, mode, buffering)


def set_default_permissions(path: Path) -> None:
    """Give a file the permissions of a newly created file. safetensors makes its files readable by their owner only.

    The umask can only be read by changing it, and that would change it for all threads.
    """
    empty = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.mode")
    open_to_write(empty, "xb").close()
    shutil.copymode(empty, path)
    empty.unlink()


@contextlib.contextmanager
def atomic_replacement(path: Path, *, check: Callable[[], None] = lambda: None, ending: str = ".tmp") -> Iterator[Path]:
    """Yield the path of a temporary file to write; when the block ends, that file replaces `path` in one rename.

    If the block raises, or `check`, which is called right before the rename, the temporary file is removed and `path`
    stays as it was. Each call has its own temporary name (`.NAME.XXXXXXXX` and the `ending`, beside `path`), so that
    several processes may write the same file at the same time. The folder must exist. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{ending}")
    try:
        yield temporary
        check()
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def atomic_write(
    path: Path,
    content: str | bytes,
    *,
    durable: bool = True,
    check: Callable[[], None] = lambda: None,
    ending: str = ".tmp",
) -> None:
    """Replace the content of a file atomically. Text is written as UTF-8. Raises OSError.

    `durable`: wait until the content is on the disk before the rename, so that it survives a power failure. Files that
    are rewritten every few seconds do without. `check`, `ending`: see `atomic_replacement`.
    """
    data = content.encode("utf-8", errors="surrogateescape") if isinstance(content, str) else content
    with atomic_replacement(path, check=check, ending=ending) as temporary, open_to_write(temporary, "xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def check_writable(option: str, path: Path) -> None:
    """Raise UserError if the file `path` that the `option` names cannot be written: for an answer before an hour of
    work. Creates its folder."""
    with writing(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open_to_read(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fsync(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems do not support fsync of a directory; all support fsync of a file.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)
