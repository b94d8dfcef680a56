"""The order of a commit and of a deletion: what a power failure, a kill or a new owner may find at any moment."""

from __future__ import annotations

import shutil
from pathlib import Path

import helpers
import pytest

from accel_train.checkpoint.directory import (
    commit,
    delete_checkpoint,
    list_updates,
    quarantine,
    remove_leftovers,
    verify_files,
)


def write(folder: Path) -> None:
    for name in "ab":
        (folder / name).write_text(name * 100)


def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = helpers.record_disk_calls(monkeypatch)

    def check() -> None:
        calls.append(("check", "the owner"))

    for replaced in (False, True):
        calls.clear()
        commit(tmp_path, 7, write, check=check)
        temporary = calls[3][1]
        assert temporary.startswith(".update-00000007.") and temporary.endswith(".tmp")
        assert calls == [
            *(("fsync", name) for name in ("a", "b", "manifest.json", temporary)),
            ("check", "the owner"),  # as late as possible: a slow disk may take minutes until here
            *[("rename", ".update-00000007.old")] * replaced,
            ("rename", "update-00000007"),
            ("fsync", tmp_path.name),
        ]
    calls.clear()
    quarantine(tmp_path / "update-00000007")
    assert calls == [("rename", "update-00000007.broken-1"), ("fsync", tmp_path.name)]


def test_who_has_lost_the_run_commits_nothing(tmp_path: Path) -> None:
    place = commit(tmp_path, 7, lambda folder: (folder / "next").touch())

    def lost() -> None:
        raise PermissionError("lost")

    for update in (7, 8):
        with pytest.raises(PermissionError, match="lost"):
            commit(tmp_path, update, write, check=lost)
    assert list(tmp_path.iterdir()) == [place] and verify_files(place) == {"next"}


def test_a_replacement_that_fails_between_its_renames_gives_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = commit(tmp_path, 7, lambda folder: (folder / "old").touch())
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise OSError("the server does not answer")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="does not answer"):
        commit(tmp_path, 7, write)
    assert list(tmp_path.iterdir()) == [place] and verify_files(place) == {"old"}


def test_a_deletion_that_is_interrupted_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 7, write)

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            (folder / "a").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoint(tmp_path, 7)
    assert list_updates(tmp_path) == []
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())
