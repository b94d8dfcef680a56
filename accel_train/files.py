"""Read files that may be damaged, or come from somebody else; write files so that nobody ever reads a part of one.

Whatever others have written is read here: a regular file, of bounded size and depth. A file is replaced atomically: a
reader sees the old content or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from accel_train.errors import writing

LARGEST = 2**62
"""Larger than any count of this program; a larger number would only overflow somewhere."""
MAX_JSON_BYTES = 1 << 26
"""Size of the largest JSON file that is read."""
MAX_LOG_BYTES = 1 << 32
"""Size of the largest metrics.jsonl that is read: some ten million lines."""
MAX_YAML_DEPTH = 100
"""Of a YAML text: parts inside each other."""
MAX_DIGITS = 100
"""Of a whole number in JSON; a longer one would only overflow somewhere."""
MAX_LINE_BYTES = 1 << 24
"""Size of the longest line that is read; a longer one is damaged."""

GENERATION = re.compile(rb'"generation": ([0-9]{1,15})\b')
"""In a line of a run's log: which owner wrote it."""


class NotRegularFileError(OSError):
    """A path that is a link, a pipe or a device, not a regular file."""

    def __str__(self) -> str:
        return f"{self.filename} is {self.strerror}"


def require_regular_file(path: Path, *, follow: bool = False) -> os.stat_result:
    """Return the state of a regular file (with `follow`, also of one that a link points to).

    Raises NotRegularFileError for others, such as a pipe or a device: reading them could block for ever.
    """
    status = path.stat() if follow else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularFileError(errno.EINVAL, f"{_kind(status.st_mode)}, not a regular file", str(path))
    return status


class TooLargeError(OSError, ValueError):
    """A file has more bytes than one of its kind can have. Reading it could fill the memory."""

    def __str__(self) -> str:
        return f"{self.filename} has {self.strerror}"


def open_regular_file(path: Path, *, follow: bool = False, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, open for reading. Raises NotRegularFileError, and OSError.

    The open file is checked, not its name, which may lead elsewhere a moment later. Opening never waits, as opening a
    pipe otherwise does. `flags`: of os.open; `open_to_write` opens for writing.
    """
    flags |= os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except BlockingIOError:  # a file server gives it away only after a moment, for which we wait
        require_regular_file(path, follow=follow)
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            require_regular_file(path, follow=follow)
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise NotRegularFileError(errno.EINVAL, f"{_kind(mode)}, not a regular file", str(path))
    return descriptor


def read_regular_file(path: Path, most: int = MAX_JSON_BYTES, *, follow: bool = False) -> bytes:
    """Return the content of a regular file. Raises OSError; TooLargeError if it has more than `most` bytes."""
    descriptor = open_regular_file(path, follow=follow)
    try:
        size = os.fstat(descriptor).st_size
        pieces: list[bytes] = []
        found = 0
        while found <= most and size <= most:
            piece = os.read(descriptor, max(size - found, 0) + 4096)
            if not piece:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.append(piece)
            found += len(piece)
    finally:
        os.close(descriptor)
    raise TooLargeError(errno.EFBIG, f"{max(size, found):,} bytes, more than such a file can have", str(path))


def open_to_read(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open a regular file, or the one that a link points to, for reading. Raises OSError."""
    return os.fdopen(open_regular_file(path, follow=True), "rb", buffering)


def read_stripped(path: Path, most: int = MAX_JSON_BYTES, *, follow: bool = False) -> str:
    """Return the text of a file, without white space around it; "" if it cannot be read. See `read_regular_file`."""
    try:
        return read_regular_file(path, most, follow=follow).decode(errors="replace").strip()
    except OSError:
        return ""


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says. Raises ValueError, also if it is nested too deeply or a number is huge."""
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is not one."""
    try:
        values = parse_json(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def read_yaml(text: str | bytes, *, nodes: bool = False) -> Any:
    """Return what a YAML text says, as yaml.safe_load does; or its root node, with each scalar as its text.

    An alias is refused, because a few can stand for endless values. Not with libyaml, which ends the process (SIGSEGV)
    when parts are nested too deeply. Raises yaml.YAMLError, and ValueError for a value that is none of its kind.
    """
    import yaml

    class Bounded(yaml.BaseLoader if nodes else yaml.SafeLoader):  # type: ignore[misc]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            problem = ""
            if self.depth > MAX_YAML_DEPTH:
                problem = f"more than {MAX_YAML_DEPTH} parts inside each other"
            elif self.check_event(yaml.AliasEvent):
                problem = "an alias (*NAME), which is not read here; write its values again"
            if problem:
                raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    loader = Bounded(text)
    try:
        return loader.get_single_node() if nodes else loader.get_single_data()
    finally:
        loader.dispose()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no such file, or if it is damaged."""
    try:
        return json_object(read_regular_file(path, follow=True)) or {}
    except (OSError, ValueError):
        return {}


def read_json_lines(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a run's log, without damaged lines and one that is being written.

    With `kind` only those whose "kind" it is. `log_lines` says what else is left out. A file that is not there has no
    lines. Raises OSError, also for what is no regular file or has more than MAX_LOG_BYTES.
    """
    wanted = b"" if kind is None else f'"kind": "{kind}"'.encode()  # parsing each line of many runs would take long
    try:
        descriptor = open_regular_file(path, follow=True)
    except FileNotFoundError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if (size := os.fstat(descriptor).st_size) > MAX_LOG_BYTES:
            raise TooLargeError(errno.EFBIG, f"{size:,} bytes, more than such a file can have", str(path))
        # The pieces of a longer line are no objects.
        for line in log_lines(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
            values = json_object(line) if wanted in line else None
            if values is not None and (kind is None or values.get("kind") == kind):
                yield values


def log_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Leave out lines that an earlier owner of the run wrote after a later one: their "generation" is lower."""
    newest = 0
    for line in lines:
        found = GENERATION.search(line)
        generation = int(found[1]) if found else newest
        if generation >= newest:
            newest = generation
            yield line


def is_number(value: Any, least: float = 0.0, most: float = LARGEST) -> bool:
    """Whether the value is a finite number from `least` to `most`, and not true or false."""
    return type(value) in (int, float) and least <= value <= most


def is_count(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Whether the value is a whole number from `least` to `most`, and not true or false."""
    return type(value) is int and least <= value <= most


def is_file_name(text: str) -> bool:
    """Whether the text can name a visible file in a folder: no path, no control characters."""
    plain = not re.search(r"[/\\\x00-\x1f\x7f]", text) and len(os.fsencode(text)) <= 200
    return plain and bool(text.strip()) and not text.startswith(".")


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFDIR: "a folder",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


# Writing.


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
