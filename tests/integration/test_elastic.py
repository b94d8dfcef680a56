"""A run under agents of torchrun that are killed, end, and join: docs/clusters.md, "Agents that come and go"."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import helpers
import pytest
from agents import Agent, Elastic, elastic

from accel_train.checkpoint.directory import find_newest_checkpoint
from accel_train.launch import process

WORDS = ("digits", "--bitwise", "true", "--log-every-updates", 5, "--checkpoint.every-seconds", 2)


def check_records(found: Elastic) -> None:
    """Check that the agents that are left end with 0, that nobody owns the run, and that its records fit together."""
    left = [agent for agent in found.agents if agent.popen.poll() in (None, 0)]
    assert left and [agent.popen.wait(60) for agent in left] == [0] * len(left), found.output
    assert not (found.run / "owner.json").exists()
    updates = [line["update"] for line in found.lines() if line["kind"] == "train"]
    assert updates == sorted(set(updates))
    for before, after in pairwise(found.starts):
        assert before["first_update"] <= before["last_update"] <= after["first_update"]
    own = [line for line in found.output.splitlines() if "Error" in line and "accel_train" in line]
    assert own == [], own


def rank_of(agent: Agent, found: Elastic) -> int:
    """Return the training process of an agent, once it has one."""
    found.until(lambda: agent.rank_process is not None)
    assert agent.rank_process is not None
    return agent.rank_process


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_when_an_agent_is_killed_its_rank_ends_and_the_others_go_on(tmp_path: Path) -> None:
    words = (*WORDS, "--epochs", 20)
    with elastic(tmp_path / "run", *words, agents=2, nodes="1:2") as found:
        found.until_trained(2, updates=5)
        orphan = rank_of(found.agents[1], found)
        found.agents[1].kill()
        found.until(lambda: not Path(f"/proc/{orphan}").exists(), 30)
        found.until(lambda: found.status.get("state") == "finished", 200)
        check_records(found)
        before, last = found.starts[-2:]
        assert (before["processes"], last["processes"]) == (2, 1) and last["finished"]
        update = last["first_update"]
        assert update == before["last_update"]  # nothing is trained again
        assert (
            f"Stopped by the launcher's death (rank 1) after update {update} of 600; nothing is lost." in found.output
        )
        assert "go on  by itself, without that process" in found.output
        line = rf"continuing after update {update}, in epoch \d+, on 1 process \(2 before\)$"
        assert re.search(line, found.output, re.MULTILINE)
        assert not (found.run / "REQUEUE").exists()
    done = helpers.run(*words, "--output-dir", tmp_path / "alone", timeout=200)
    assert done.returncode == 0, done.stderr
    files = [tmp_path / name / "model.safetensors" for name in ("run", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_agents_are_lost_and_join_again_and_again(tmp_path: Path) -> None:
    """A node is lost, a new one takes rank 0, gets SIGTERM, another one joins, a process is killed: the same run."""
    words = (*WORDS, "--epochs", 500, "--augment.resize", 32, "--model.image-size", 32)
    with elastic(tmp_path / "run", *words) as found:
        found.until_trained(3, updates=15)
        found.agents[2].kill(with_rank=True)
        found.until_trained(2)
        new = found.start("127.0.0.2")  # before the others in their order
        found.until_trained(3)
        assert f'"pid": {new.rank_process},' in (found.run / "owner.json").read_text()
        starts = len(found.starts)
        new.kill(signal.SIGTERM)
        found.until_trained(2, starts=starts)
        assert new.popen.wait(60) != 0
        newest = found.start("127.0.0.3")
        found.until_trained(3)
        starts = len(found.starts)
        newest.kill(with_rank=True)  # the third step: rank 0 again, which serves the store
        found.until_trained(2, starts=starts)
        starts = len(found.starts)
        os.kill(rank_of(found.agents[1], found), signal.SIGKILL)
        found.until_trained(2, starts=starts)
        assert "Stopped by SIGTERM (rank 0) after update" in found.output
        assert re.search(r"on 2 processes \(3 before\)", found.output)
        assert re.search(r"on 3 processes \(2 before\)", found.output)
        (found.run / "STOP").touch()  # a person's wish is for all: no agent starts again
        found.until(lambda: found.status.get("state") == "interrupted")
        check_records(found)
        update = found.status["update"]
    with helpers.started(tmp_path / "alone", *words, "--checkpoint.every-updates", update) as alone:
        alone.until(lambda: alone.status.get("update", 0) > update, 400)
        files = [run / "checkpoints" / f"update-{update:08d}" / "model.safetensors" for run in (found.run, alone.run)]
        alone.until(files[1].exists)
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_losing_the_host_of_the_rendezvous_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = (*WORDS, "--epochs", 200)
    with elastic(tmp_path / "run", *words, agents=2) as found:
        found.until_trained(2)
        found.agents[0].kill(with_rank=True)
        assert found.agents[1].popen.wait(120) != 0
        assert "has lost rank 0, which was killed, or its node" in found.output
        newest, starts = find_newest_checkpoint(found.run), len(found.starts)
        assert newest is not None
    with elastic(tmp_path / "run", *words, agents=2) as again:
        again.until_trained(2, starts=starts)
        assert again.starts[-1]["first_update"] >= int(newest.name.rpartition("-")[2])


@pytest.mark.parametrize(
    ("variables", "count", "identifier", "others"),
    [
        ({}, "0", "", False),
        ({"RUN_ID": "a", "RESTART_COUNT": "2", "MAX_RESTARTS": "0"}, "0", "", False),
        ({"RUN_ID": "a", "RESTART_COUNT": "2", "MAX_RESTARTS": "3"}, "0", "a", True),
        ({"RUN_ID": "a", "RESTART_COUNT": "2", "MAX_RESTARTS": "3", "USE_AGENT_STORE": "True"}, "2", "a", True),
    ],
)
def test_what_a_process_knows_of_its_agent(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: str, identifier: str, others: bool
) -> None:
    for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE"):
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert (process.restart_count(), process.elastic_id(), process.other_agents_restart()) == (
        count,
        identifier,
        others,
    )
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    assert not process.other_agents_restart()
