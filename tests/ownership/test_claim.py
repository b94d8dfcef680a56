"""A start claims a run: of an owner that is alive, dead, elsewhere or of nobody."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from owners import claim, forge

from accel_train.errors import UserError
from accel_train.launch import process
from accel_train.ownership import owner
from accel_train.ownership.owner import FILE, Lease, Owner, read_owner, remove_owner


@pytest.mark.ci
def test_starts_of_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from accel_train.ownership.claim import new_directory\n"
        "while not Path('go').exists(): time.sleep(0.001)\n"
        "print(*(new_directory('digits')[0] for _ in range(20)), sep='\\n')"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    names = [name for start in starts for name in start.communicate(timeout=60)[0].split()]
    assert len(set(names)) == 60
    assert all((tmp_path / name).is_dir() and name.startswith("runs/digits/20") for name in names)
    assert len({name[:31] for name in names}) <= 3  # it was one second, or the next began meanwhile


def test_an_owner_elsewhere_that_lives_or_may_live_is_refused_at_a_terminal(quick: None, tmp_path: Path) -> None:
    forge(tmp_path / "run", age=0.9, job="4711")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"an owner: process \d+ on node9, job 4711, since 20.* is 1 s old"):
        claim(tmp_path / "run")
    assert time.monotonic() - began < 0.3
    forge(tmp_path / "run", age=1000)
    claim(tmp_path / "run").release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_job_waits_for_a_silent_owner_elsewhere_and_no_longer_than_until_it_shows_life(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    forge(tmp_path / "run")
    # The other host's clock is wrong, and with it what it says of the file's age, as on Lustre.
    os.utime(tmp_path / "run" / FILE, (time.time() + 500,) * 2)
    began = time.monotonic()
    claim(tmp_path / "run").release()
    assert 1.5 <= time.monotonic() - began < 3
    assert capsys.readouterr().out.count("has an owner") == 1

    forge(tmp_path / "run", job="4")
    os.utime(tmp_path / "run" / FILE, (time.time() - 500,) * 2)  # wrong the other way: it seems to be long dead
    beats = threading.Timer(0.2, lambda: os.utime(tmp_path / "run" / FILE, (time.time() - 499,) * 2))
    beats.start()
    with pytest.raises(UserError, match="has an owner"):
        claim(tmp_path / "run")
    beats.join()

    forge(tmp_path / "run")
    with pytest.raises(UserError, match="Stopped by SIGTERM while waiting"):
        claim(tmp_path / "run", stopped=lambda: "SIGTERM")


def test_the_same_job_waits_for_the_end_of_its_older_step(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)"])
    forge(tmp_path, machine=process.machine_id(), pid=older.pid, started=process.start_time(older.pid), job="5")
    monkeypatch.setenv("PBS_JOBID", "6")
    with pytest.raises(UserError, match=f"process {older.pid}"):
        claim(tmp_path)
    monkeypatch.setenv("PBS_JOBID", "5")
    claim(tmp_path).release()
    assert older.poll() is None or older.returncode == 0
    older.wait()


@pytest.mark.ci
@pytest.mark.parametrize("content", ["", '{"token": 3}'])
def test_an_owner_file_that_is_none_is_nobodys_after_a_while(quick: None, tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match="does not name"):
        claim(tmp_path)
    os.utime(tmp_path / FILE, (time.time() - 1000,) * 2)
    claim(tmp_path).release()
    (tmp_path / FILE).write_text(content)
    claim(tmp_path, take_over=True).release()


@pytest.mark.ci
@pytest.mark.parametrize("links", [True, False])
def test_of_many_starts_that_find_a_dead_owner_one_gets_the_run(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)  # as FAT and some FUSE file systems do
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in range(15):
        run = tmp_path / str(number)
        forge(run, machine=process.machine_id(), pid=dead.pid, started="1")
        winners: list[Lease] = []
        losers: list[UserError] = []
        gate = threading.Barrier(6)

        def contend(
            run: Path = run,
            gate: threading.Barrier = gate,
            winners: list[Lease] = winners,
            losers: list[UserError] = losers,
        ) -> None:
            gate.wait()
            try:
                winners.append(claim(run))
            except UserError as error:
                losers.append(error)

        threads = [threading.Thread(target=contend) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.15)
        assert [lease.holds() for lease in winners].count(True) == 1
        assert len(winners) + len(losers) == 6
        for lease in winners:
            lease.release()
        for path in run.iterdir():  # of losers that were stopped before they could give it back
            assert path.name == "generations" and not any(file.stat().st_size for file in path.iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EACCES, errno.EMLINK, errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_has_no_links_can_be_written(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)  # vfat, FUSE, some NFS and object stores: each with an error of its own
    lease = claim(tmp_path / "run")
    assert lease.holds()
    with pytest.raises(UserError, match="--take-over"):
        claim(tmp_path / "run")
    lease.release()

    # What really cannot be written still cannot be, and leaves no part of a file.
    opened = owner.open_to_write

    def full(path: Path) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    def read_only(path: Path, mode: Any) -> Any:
        if mode == "xb":
            raise OSError(errno.EACCES, "Permission denied")
        return opened(path, mode)

    for name, method, replacement, reason in (
        (
            "full",
            "read_regular_file",
            full,
            "No space left on device",
        ),  # after its creation
        ("read-only", "open_to_write", read_only, "Permission denied"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, replacement)
            with pytest.raises(UserError, match=f"{name} cannot be written .{reason}"):
                claim(tmp_path / name)
        assert not (tmp_path / name / FILE).exists()


def test_a_number_that_another_process_has_now_is_a_process_that_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = process.start_time(child.pid)
    assert not process.has_ended(child.pid, began)
    assert process.has_ended(child.pid, f"{began}1")
    child.kill()
    deadline = time.monotonic() + 10
    while not process.has_ended(child.pid, began):  # a zombie: nobody has waited for it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.communicate()
    assert process.has_ended(child.pid, began)


def test_a_start_removes_the_owner_that_it_has_judged_and_no_other(tmp_path: Path) -> None:
    """Another start may have taken the run of the dead owner first."""
    me, dead = Owner.of_this_process(), forge(tmp_path)
    judged = read_owner(tmp_path / FILE)
    (tmp_path / FILE).unlink()
    winner = forge(tmp_path, token="winner")
    remove_owner(tmp_path, judged, me)
    assert read_owner(tmp_path / FILE).owner == winner != dead
    remove_owner(tmp_path, read_owner(tmp_path / FILE), me)
    assert list(tmp_path.iterdir()) == []


def test_whoever_loses_a_run_can_read_who_has_it(tmp_path: Path, quick: None) -> None:
    """Whatever the umask of the one who took it over: else the loser would go on writing."""
    before = os.umask(0o077)
    try:
        claim(tmp_path / "run")
    finally:
        os.umask(before)
    assert (tmp_path / "run" / FILE).stat().st_mode & 0o777 == 0o644
