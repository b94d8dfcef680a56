"""Atomic replacement of files: the old content or the new one, with many writers and after errors."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from accel_train.files import atomic_replacement, atomic_write


def test_the_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, expected in (("ä\n", "ä\n".encode()), (b"\0\xff", b"\0\xff"), ("name\udcff", b"name\xff")):
        atomic_write(path, content, durable=False)
        assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]
    other = tmp_path / "b"
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_after_an_error_the_old_file_is_whole_and_no_temporary_one_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, "old")

    def interrupted() -> None:
        with atomic_replacement(path) as temporary:
            temporary.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "gone" / "a", "new")
    assert not (tmp_path / "gone").exists()  # a mount that has gone must not be replaced by a folder


def test_several_writers_never_leave_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "a"
    contents = {number: str(number) * 50_000 for number in range(4)}
    atomic_write(path, contents[0])

    def write(number: int) -> None:
        for _ in range(50):
            atomic_write(path, contents[number], durable=False)

    writers = [threading.Thread(target=write, args=(number,)) for number in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in contents.values()
    assert list(tmp_path.iterdir()) == [path]
