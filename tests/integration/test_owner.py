"""A run has one writer: several starts in one directory, and owners that die, are suspended or run elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from helpers import started

from accel_train.checkpoint.directory import checkpoint_path, commit, list_updates, remove_leftovers
from accel_train.cli import main
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.launch import process
from accel_train.ownership import claim as claim_module
from accel_train.ownership import lease as lease_module
from accel_train.ownership import owner as owner_module
from accel_train.ownership.claim import Claim
from accel_train.ownership.generation import is_late, last_begun, read_result
from accel_train.ownership.lease import Lease, LostError
from accel_train.ownership.owner import FILE, Owner
from accel_train.records.directory import RunDirectory
from accel_train.untrusted import read_json_lines

LONG = ("digits", "--epochs", 500, "--log-every-updates", 5, "--checkpoint.every-updates", 20)


def not_stopped() -> str:
    return ""


def forge(run: Path, *, age: float = 0.0, **changes: Any) -> Owner:
    """Write the owner.json of a process on another host, whose heartbeat is `age` seconds old."""
    run.mkdir(parents=True, exist_ok=True)
    other = dataclasses.replace(Owner.of_this_process(), **({"host": "node9", "machine": "node9 boot"} | changes))
    (run / FILE).write_text(json.dumps(dataclasses.asdict(other)))
    os.utime(run / FILE, (time.time() - age,) * 2)
    return other


def claim(run: Path, *, take_over: bool = False, stopped: Callable[[], str] = not_stopped) -> Lease:
    attempts = Claim(Config(output_dir=run, take_over=take_over), stopped)
    while (found := attempts.attempt()) is None:
        pass
    return Lease(*found, renews=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits to seconds, and hide the job in which the tests may run."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, seconds in {"BEAT": 0.1, "CONFIRM": 0.3, "STALE": 1.5, "POLL": 0.02}.items():
        for module in (claim_module, lease_module, owner_module):
            monkeypatch.setattr(module, f"{name}_SECONDS", seconds, raising=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_starts_of_one_second_get_directories_of_their_own(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from accel_train.ownership.folders import new_directory\n"
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


def test_a_start_that_is_refused_or_only_shows_its_configuration_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("", "--output-dir a/b --take-over true"):
        assert main(["train", "digits", "--config-only", "true", *words.split()]) == 0
        assert main(["train", "digits", "--data.name", "folder", "--data.root", "none", *words.split()]) == 2
        assert list(tmp_path.iterdir()) == []
    assert main(["train", "digits", "--resume", "must"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "take_over" not in capsys.readouterr().out  # else config.yaml would take the run over again and again


def test_a_second_start_is_refused_and_a_killed_owners_run_goes_on_at_once(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG) as run:
        run.until_trained(25)
        run.until(lambda: list_updates(run.run / "checkpoints"))
        (run.run / "checkpoints" / ".update-00009999.1.tmp").mkdir()  # as if the owner were saving
        second = helpers.run(*LONG, "--seed", 7, "--output-dir", run.run)
        assert second.returncode == 2, second.stdout
        errors = [line for line in second.stderr.splitlines() if line]
        assert len(errors) == 1 and f"process {run.popen.pid} on " in errors[0], second.stderr
        assert "since 20" in errors[0] and "--take-over true" in errors[0]
        assert "seed: 0" in (run.run / "config.yaml").read_text()
        assert (run.run / "checkpoints" / ".update-00009999.1.tmp").exists()
        before = run.status["update"]
        run.until_trained(before + 5)
        run.popen.send_signal(signal.SIGKILL)  # and it is not waited for: it stays as a zombie
        time.sleep(0.2)
        assert (run.run / FILE).exists()
        (run.run / "REQUEUE").write_text("5\n")
        with started(tmp_path / "run", *LONG) as again:
            again.until(lambda: "continuing after update" in again.output)
            assert not (run.run / "REQUEUE").exists()
            again.until_trained(before)
            again.popen.send_signal(signal.SIGTERM)
            assert again.ended() == 0, again.output
        lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
        updates = [line["update"] for line in lines if line["kind"] == "train"]
        assert updates == sorted(set(updates))
        assert not list(run.run.glob("*owner*")) and not list(run.run.glob(".owner*"))


@pytest.mark.ci
def test_two_processes_have_one_owner_and_end_soon_after_their_launcher(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, "--checkpoint.every-updates", 1000, processes=2, fresh=True) as run:
        run.until_trained(5)
        ranks = run.pids()
        started_at = {rank: process.start_time(rank) for rank in ranks}
        assert json.loads((run.run / FILE).read_text())["pid"] == ranks[0]
        run.popen.send_signal(signal.SIGKILL)
        run.popen.wait()
        deadline = time.monotonic() + 20
        while not all(process.has_ended(rank, started_at[rank]) for rank in ranks):
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
        assert run.status["state"] == "interrupted" and "the launcher's death" in run.output
        assert list_updates(run.run / "checkpoints")[-1] == run.status["update"]
        assert not (run.run / FILE).exists()


def test_a_suspended_owner_whose_run_was_taken_over_ends_and_writes_nothing(tmp_path: Path) -> None:
    with started(tmp_path / "run", *LONG, processes=2) as run:
        run.until_trained(25)
        run.until(lambda: list_updates(run.run / "checkpoints"))
        refused = helpers.run(*LONG, "--output-dir", run.run, processes=2)
        assert refused.returncode != 0 and refused.stderr.count("accel-train: error:") == 1
        assert f"has an owner: process {run.pids()[0]} on" in refused.stderr
        family = run.family()
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        newest = checkpoint_path(run.run / "checkpoints", list_updates(run.run / "checkpoints")[-1])
        epochs = json.loads((newest / "state.json").read_text())["train"]["epoch"] + 1  # to its end, soon
        words = (*LONG, "--take-over", "true", "--allow-change", "epochs", "--epochs", epochs)
        taken = helpers.run(*words, "--output-dir", run.run)
        assert taken.returncode == 0, taken.stdout + taken.stderr
        assert "is taken over from process" in taken.stdout
        # What the next owner might be writing at this moment:
        (run.run / FILE).write_text(json.dumps(dataclasses.asdict(Owner.of_this_process())))
        temporary = run.run / "checkpoints" / ".update-00009999.1.tmp"
        temporary.mkdir()
        before = contents(run.run)
        for pid in reversed(family):
            os.kill(pid, signal.SIGCONT)
        assert run.ended() != 0
        assert run.output.count("Another start has taken") == 1, run.output
        assert contents(run.run) == before and temporary.exists()


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


@pytest.mark.parametrize("content", ["", '{"token": 3}'])
def test_an_owner_file_that_is_none_is_nobodys_after_a_while(quick: None, tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match="does not name"):
        claim(tmp_path)
    os.utime(tmp_path / FILE, (time.time() - 1000,) * 2)
    claim(tmp_path).release()
    (tmp_path / FILE).write_text(content)
    claim(tmp_path, take_over=True).release()


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
    opened = Path.open

    def full(path: Path) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    def read_only(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "xb":
            raise OSError(errno.EACCES, "Permission denied")
        return opened(path, mode, *arguments, **options)

    for name, method, replacement, reason in (
        ("full", "read_bytes", full, "No space left on device"),  # between the creation of the file and its content
        ("read-only", "open", read_only, "Permission denied"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, replacement)
            with pytest.raises(UserError, match=f"{name} cannot be written .{reason}"):
                claim(tmp_path / name)
        assert not (tmp_path / name / FILE).exists()


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
        lambda: mine.rewind(0),
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
    assert winner.holds() and (tmp_path / FILE).exists()
    winner.release()


def test_a_living_owner_shows_it(quick: None, tmp_path: Path) -> None:
    lease = claim(tmp_path)
    before = (tmp_path / FILE).stat().st_mtime_ns
    time.sleep(0.5)
    assert (tmp_path / FILE).stat().st_mtime_ns > before
    lease.release()
    assert not (tmp_path / FILE).exists()


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


def test_generations_grow_also_where_only_the_records_were_copied(quick: None, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"generation": 4}')
    (tmp_path / "result.json").write_text('{"generation": "?"}')
    numbers = []
    for _ in range(3):
        lease = claim(tmp_path)
        lease.begin(5)
        numbers.append(lease.generation)
        lease.release()
    assert numbers == [5, 6, 7]
    assert last_begun(tmp_path) == (7, 5)
    assert len(list((tmp_path / "generations").iterdir())) == 1


LATE: dict[str, Callable[[RunDirectory], object]] = {
    "log": lambda late: late.log("train", update=12),
    "status": lambda late: late.status("training", force=True, update=12),
    "rewind": lambda late: late.rewind(0),
    "result": lambda late: late.result({"of": "late"}),
    "failure": lambda late: late.fail("late"),
    "requeue": lambda late: late.ask_for_requeue(12),
    "code": lambda late: late._replace("code/net.py", "late"),
    "checkpoint": lambda late: checkpoint_of(late, 12),
    "weights": lambda late: weights_of(late),
}


def checkpoint_of(directory: RunDirectory, update: int) -> None:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps({"generation": directory.lease.generation}))

    commit(directory.path / "checkpoints", update, write, check=directory.lease.check)


def weights_of(directory: RunDirectory) -> None:
    with directory.lease.replacing(directory.path / "model.safetensors") as temporary:
        temporary.write_text("late")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", LATE)
def test_an_owner_stopped_between_its_check_and_its_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It is stopped right after the check; the next owner trains, finishes and ends; only then it writes."""
    (tmp_path / "code").mkdir()
    late = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path))
    late.lease.begin(0)
    late.log("train", update=8)
    late.log("train", update=12)
    checkpoint_of(late, 10)
    check, states = late.lease.check, []

    def stopped_after_the_check() -> None:
        check()
        monkeypatch.setattr(late.lease, "check", check)
        other = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path, take_over=True))
        remove_leftovers(tmp_path / "checkpoints")
        other.lease.begin(10)
        other.rewind(10)
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
    assert len(states) == 1
    assert contents(tmp_path) == states[0]
    with pytest.raises(LostError, match="Another start has taken"):
        late.lease.check()


def test_readers_leave_out_what_was_written_late(quick: None, tmp_path: Path) -> None:
    """On a file system that shows a new file late, the next owner may miss an unfinished write."""
    run = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path))
    run.log("train", update=5)
    checkpoint_of(run, 5)
    run.lease.release()
    for number, content in ((2, {"of": "late"}), (3, {"of": "newest"})):
        (tmp_path / "generations").mkdir(exist_ok=True)
        (tmp_path / "generations" / f"{number:08d}.json").write_text(json.dumps({"update": 5 * (number - 1)}))
        (tmp_path / "result.json").write_text(json.dumps({**content, "generation": number}))
        assert read_result(tmp_path)["of"] == content["of"]
    (tmp_path / "result.json").write_text('{"of": "late", "generation": 2}')
    assert read_result(tmp_path) == {}
    lines = [
        '{"kind": "train", "update": 6, "generation": 2}',
        '{"kind": "train", "update": 6, "generation": 3}',
        '{"kind": "train", "update": 7, "generation": 2}',
        '{"kind": "train", "update": 7}',  # of an older version, which has no generations
        '{"kind": "train", "update": 8, "generation": 3}',
    ]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    updates = [
        (line["update"], line.get("generation")) for line in read_json_lines(tmp_path / "metrics.jsonl", "train")
    ]
    assert updates == [(5, 1), (6, 2), (6, 3), (7, None), (8, 3)]
    for update, number in ((10, 2), (11, 2), (12, 3)):
        assert is_late(tmp_path, {"generation": number}, update) == (update == 11)


@pytest.mark.ci
def test_a_suspended_owner_does_not_take_a_finished_run_back(tmp_path: Path) -> None:
    short = ("digits", "--epochs", 30, "--log-every-updates", 5, "--checkpoint.every-updates", 20)
    with started(tmp_path / "run", *short) as run:
        run.until_trained(25)
        run.until(lambda: list_updates(run.run / "checkpoints"))
        run.popen.send_signal(signal.SIGSTOP)
        longer = ("--epochs", 40, "--allow-change", "epochs", "--take-over", "true", "--output-dir", run.run)
        try:
            other = helpers.run(*short[:1], *short[3:], *longer)
            assert other.returncode == 0, other.stderr
            result = (run.run / "result.json").read_bytes()
        finally:
            run.popen.send_signal(signal.SIGCONT)
        assert run.ended() == 2, run.output
        assert "Another start has taken" in run.output
        assert (run.run / "result.json").read_bytes() == result and not (run.run / FILE).exists()
        lines = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
        updates = [line["update"] for line in lines if line["kind"] == "train"]
        assert updates == sorted(set(updates))
