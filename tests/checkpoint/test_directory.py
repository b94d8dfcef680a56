"""A checkpoint's directory is complete or absent: what a power failure, a kill, a new owner or altered bytes leave."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import helpers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_train.checkpoint.directory import (
    BrokenError,
    checkpoint_path,
    commit,
    delete_checkpoint,
    list_updates,
    quarantine,
    remove_leftovers,
    updates_to_keep,
    verify_files,
)

# Commits as fast as it can, says what it has committed, replaces every third and keeps two.
COMMITTING = """
import os, sys
from pathlib import Path
from accel_train.checkpoint.directory import commit, delete_checkpoint, list_updates, remove_leftovers

folder = Path(sys.argv[1])
remove_leftovers(folder)
update = max(list_updates(folder), default=0)
def write(path):
    for name in ("a", "b", "c"):
        (path / name).write_bytes(os.urandom(300_000))
while True:
    update += 1
    for _ in range(1 + (update % 3 == 0)):
        commit(folder, update, write)
        print(update, flush=True)
    for old in list_updates(folder)[:-2]:
        delete_checkpoint(folder, old)
"""


def write(path: Path) -> None:
    (path / "a").write_bytes(b"a" * 1000)
    (path / "b").write_bytes(b"b" * 1000)


@pytest.mark.parametrize("kills", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_killed_at_any_moment_what_is_visible_is_whole_and_nothing_is_lost(tmp_path, kills):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    generator = random.Random(0)
    for _ in range(kills):
        log = tmp_path / "log"
        with log.open("wb") as out:
            process = helpers.forked(("-c", COMMITTING, folder), 1, helpers.environment(), out, out)
            while not log.read_text() and process.poll() is None:  # until the first one is committed
                time.sleep(0.005)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(generator.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait()
        for update in list_updates(folder):
            verify_files(checkpoint_path(folder, update))
        remove_leftovers(folder)
        assert not list(folder.glob(".*"))
        said = [int(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found = list_updates(folder)
        assert found[-1] >= said[-1]
        verify_files(checkpoint_path(folder, found[-1]))


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    place = commit(tmp_path, 7, write)
    place.rename(tmp_path / ".update-00000007.old")  # the state that such a kill leaves
    (tmp_path / ".update-00000007.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["update-00000007"]
    verify_files(place)


def test_a_write_that_fails_leaves_the_old_one_and_no_rubbish(tmp_path):
    place = commit(tmp_path, 7, write)

    def fail(path: Path) -> None:
        write(path)
        raise OSError("the disk is full")

    for update in (7, 8):
        with pytest.raises(OSError, match="the disk is full"):
            commit(tmp_path, update, fail)
        assert [path.name for path in tmp_path.iterdir()] == [place.name]
        verify_files(place)


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


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / "b").read_bytes())
    content[500] ^= 1
    (path / "b").write_bytes(content)


DAMAGES = {
    "b is altered": flip_a_byte,
    "b has 999 bytes instead of 1000": lambda path: os.truncate(path / "b", 999),
    "b is missing": lambda path: (path / "b").unlink(),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is altered": lambda path: (path / "manifest.json").write_text("{}"),
    "manifest.json is altered (JSON": lambda path: os.truncate(path / "manifest.json", 50),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_any_damage_is_found_and_the_file_is_named(tmp_path, message):
    place = commit(tmp_path, 7, write)
    verify_files(place)
    DAMAGES[message](place)
    with pytest.raises(BrokenError) as error:
        verify_files(place)
    assert str(place) in str(error.value)
    assert message in str(error.value)
    if "manifest" not in message:
        verify_files(place, only="a")


def test_broken_ones_are_set_aside_under_names_of_their_own(tmp_path):
    names = [quarantine(commit(tmp_path, 7, write)).name for _ in range(2)]
    assert names == ["update-00000007.broken-1", "update-00000007.broken-2"]
    assert list_updates(tmp_path) == []


@given(st.sets(st.integers(0, 30)), st.integers(1, 4), st.none() | st.integers(0, 30))
def test_survivors_are_the_newest_and_the_best_and_no_others(updates, keep, best):
    kept = updates_to_keep(updates, keep, best)
    assert kept == {update for update in updates if update == best or sum(other > update for other in updates) < keep}
