"""Atomic replacement of files: the old content or the new one, with many writers and after errors."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import helpers
import pytest

from accel_train.files import (
    WRITING,
    NotRegularFileError,
    atomic_replacement,
    atomic_write,
    fsync,
    open_to_write,
    set_default_permissions,
)
from accel_train.launch.process import write_stacks


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


def test_a_durable_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = helpers.record_disk_calls(monkeypatch)
    atomic_write(tmp_path / "a", "text", check=lambda: calls.append(("check", "")), ending=".mine")
    (first, temporary), *others = calls
    assert first == "fsync" and temporary.startswith(".a.") and temporary.endswith(".mine")
    assert others == [("check", ""), ("rename", "a")]
    calls.clear()
    atomic_write(tmp_path / "a", "newer", durable=False)  # such as status.json, every few seconds
    assert calls == [("rename", "a")]


def test_whoever_may_no_longer_write_replaces_nothing(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "the next owner's")

    def lost() -> None:
        raise PermissionError("lost")

    with pytest.raises(PermissionError, match="lost"):
        atomic_write(tmp_path / "a", "late", check=lost)
    assert (tmp_path / "a").read_text() == "the next owner's" and len(list(tmp_path.iterdir())) == 1


def test_fsync_waits_for_files_and_folders_and_fails_where_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    calls = helpers.record_disk_calls(monkeypatch)
    for path in (tmp_path / "a", tmp_path):
        fsync(path)
    assert calls == [("fsync", "a"), ("fsync", tmp_path.name)]

    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)  # as some file systems do for a folder
    fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        fsync(tmp_path / "a")


@pytest.mark.parametrize("mode", WRITING)
def test_what_is_written_follows_no_link(tmp_path: Path, mode: Any) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_bytes(b"precious")
    (tmp_path / "scratch").mkdir()
    run.symlink_to("scratch")  # the folder may be a link
    (run / "link").symlink_to(precious)
    (run / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(run / "pipe")
    (run / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder"):
        with pytest.raises(FileExistsError if mode == "xb" else OSError, match=name):
            open_to_write(run / name, mode)
    with pytest.raises(FileExistsError if mode == "xb" else NotRegularFileError):
        open_to_write(run / "link", mode)
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()
    if mode != "xb":
        (run / "file").write_bytes(b"old")
    with open_to_write(run / "file", mode) as file:
        file.write(b"n")
    assert (run / "file").read_bytes() == {"wb": b"n", "xb": b"n", "ab": b"oldn", "r+b": b"nld"}[mode]


def test_stacks_and_permissions_follow_no_link(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "rank-0.txt").symlink_to(precious)
    write_stacks(tmp_path / "rank-0.txt", "it hangs")
    assert "a link, not a regular file" in capfd.readouterr().err
    write_stacks(tmp_path / "rank-1.txt", "it hangs")
    assert (tmp_path / "rank-1.txt").read_text().startswith("it hangs\n\n")
    (tmp_path / ".weights.mode").symlink_to(tmp_path / "new")
    (tmp_path / "weights").touch(0o600)
    set_default_permissions(tmp_path / "weights")
    assert not (tmp_path / "new").exists()
    assert precious.read_bytes() == b"precious"
