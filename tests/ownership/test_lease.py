"""An owner shows that it is alive, and writes nothing once another start has the run, whenever it wakes up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from owners import checkpoint_of, claim, contents, forge, weights_of

from accel_train.checkpoint.directory import commit, remove_leftovers
from accel_train.ownership.owner import FILE, Lease, LostError, Owner, read_owner
from accel_train.records.directory import RunDirectory


def test_who_has_lost_the_run_writes_no_file_more(quick: None, tmp_path: Path) -> None:
    lease = claim(tmp_path)
    mine = RunDirectory(tmp_path, writes=True, lease=lease)
    other_rank = RunDirectory(tmp_path, writes=False, lease=Lease(tmp_path, lease.owner))
    mine.log("train", update=1)
    (tmp_path / FILE).unlink()  # by a person: nobody else has it, and it comes back
    mine.result({})
    assert json.loads((tmp_path / FILE).read_text()) == dataclasses.asdict(lease.owner)  # type: ignore[arg-type]
    other_rank.fail("its own run")
    winner = claim(tmp_path, take_over=True)
    before = contents(tmp_path)
    for write in (
        lambda: mine.log("train", update=2),
        lambda: mine.status("training", force=True),
        lambda: mine.remove_lines_after(0),
        lambda: mine.result({"a": 1}),
        lambda: commit(tmp_path / "checkpoints", 3, lambda path: None, check=lease.check),
    ):
        with pytest.raises(LostError, match=r"Another start has taken .* over: process"):
            write()
    mine.fail("lost")
    other_rank.fail("lost")
    assert contents(tmp_path) == before
    assert not list((tmp_path / "checkpoints").iterdir())
    lease.release()
    assert read_owner(tmp_path / FILE).owner == winner.owner and winner.holds()
    winner.release()


def test_a_living_owner_shows_it(quick: None, tmp_path: Path) -> None:
    lease = claim(tmp_path)
    before = (tmp_path / FILE).stat().st_mtime_ns
    time.sleep(0.5)
    assert (tmp_path / FILE).stat().st_mtime_ns > before
    lease.release()
    assert not (tmp_path / FILE).exists()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_owner_that_slept_through_a_whole_other_start_has_lost_the_run(tmp_path: Path, elsewhere: bool) -> None:
    """Its owner.json is gone, but not because somebody deleted it: it must not take the finished run back."""
    sleeper = claim(tmp_path)
    sleeper._leaving.set()  # it is suspended: no more signs of life
    sleeper._thread.join()
    if elsewhere:
        forge(tmp_path, age=100)  # to the next start it is dead on another host
    other = claim(tmp_path, take_over=not elsewhere)
    other.begin(7)
    other.release()
    assert not (tmp_path / FILE).exists()
    with pytest.raises(LostError, match="has ended"):
        sleeper.check()
    assert not (tmp_path / FILE).exists() and not list(tmp_path.glob(".owner*"))


def test_an_owner_goes_on_if_the_next_one_has_not_trained(quick: None, tmp_path: Path) -> None:
    sleeper = claim(tmp_path)
    sleeper.begin(0)
    claim(tmp_path, take_over=True).release()  # its options were wrong, say
    assert sleeper.holds() and (tmp_path / FILE).exists()
    sleeper.release()
    assert [path.name for path in (tmp_path / "generations").iterdir()] == ["00000001.json"]


LATE: dict[str, Callable[[RunDirectory], object]] = {
    "log": lambda late: late.log("train", update=12),
    "line": lambda late: late.lease.append(late.metrics_path, b'{"kind": "train", "update": 12}\n'),
    "status": lambda late: late.status("training", force=True, update=12),
    "remove": lambda late: late.remove_lines_after(0),
    "result": lambda late: late.result({"of": "late"}),
    "failure": lambda late: late.fail("late"),
    "requeue": lambda late: late.ask_for_requeue(12),
    "code": lambda late: late._replace("code/net.py", "late"),
    "checkpoint": lambda late: checkpoint_of(late, 12),
    "weights": lambda late: weights_of(late),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", LATE)
@pytest.mark.parametrize("number", [1, 2])
def test_an_owner_stopped_between_its_check_and_its_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """It is stopped right after a check, most writes have two; the next owner trains, finishes and ends; only then it
    writes."""
    (tmp_path / "code").mkdir()
    late = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path))
    late.lease.begin(0)
    late.log("train", update=8)
    late.log("train", update=12)
    checkpoint_of(late, 10)
    check, checks, states = late.lease.check, iter(range(1, number)), []

    def stopped_after_the_check() -> None:
        check()
        if next(checks, None) is not None:
            return
        monkeypatch.setattr(late.lease, "check", check)
        other = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path, take_over=True))
        remove_leftovers(tmp_path / "checkpoints")
        other.lease.begin(10)
        other.remove_lines_after(10)
        other.log("train", update=12)
        for update in (12, 15):
            checkpoint_of(other, update)
        weights_of(other)
        other.status("finished", force=True)
        other.result({"of": "other"})
        other.lease.release()
        states.append(contents(tmp_path))

    monkeypatch.setattr(late.lease, "check", stopped_after_the_check)
    with contextlib.suppress(LostError, OSError):
        LATE[what](late)
    if not states:
        assert number == 2 and what in ("failure", "checkpoint", "weights", "line")
        return
    assert contents(tmp_path) == states[0]
    with pytest.raises(LostError, match="Another start has taken"):
        late.lease.check()


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk: the kernel writes a part of the line, then refuses."""
    lease, limits = Lease(tmp_path, None), resource.getrlimit(resource.RLIMIT_FSIZE)
    lease.append(tmp_path / "log", b"a" * 60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lease.append(tmp_path / "log", b"b" * 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "log").read_bytes() == b"a" * 60


def test_nobody_gives_signs_of_life_for_another_owner(tmp_path: Path) -> None:
    other = forge(tmp_path, age=100)
    before = (tmp_path / FILE).stat().st_mtime_ns
    assert read_owner(tmp_path / FILE, renew=Owner.of_this_process()).changed == before
    assert read_owner(tmp_path / FILE, renew=other).changed > before
