"""A job that starts with the nodes that it gets, on a real Slurm of four nodes of which one is taken down."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import test_slurm
from test_slurm import Cluster, Job, local_cluster

pytestmark = [*test_slurm.pytestmark, pytest.mark.slow]
WORDS = ("digits", "--bitwise", "true", "--epochs", "30", "--log-every-updates", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster(nodes=4) as started:
        yield started


@pytest.fixture(scope="module")
def alone(cluster: Cluster) -> Job:
    return cluster.submit("train.sbatch", *WORDS)


def test_a_node_that_goes_down_and_stays_down_costs_a_requeue_and_not_the_run(cluster: Cluster, alone: Job) -> None:
    alone.result()
    words = (*WORDS, "--checkpoint.every-seconds", "2")
    job = cluster.submit("train.sbatch", *words, options="--nodes=2-4 --exclusive", PROCESSES_PER_NODE="1")
    job.trains_on()
    assert job.field("NumNodes") == "4"
    cluster.command("scontrol", "update", "NodeName=127.0.0.13", "State=DOWN", "Reason=test")
    job.restarted(1)
    job.trains_on()
    assert (job.field("NumNodes"), job.field("Restarts")) == ("3", "1")
    assert job.result()["world_size"] == 3
    assert "DOWN" in cluster.command("scontrol", "show", "node", "127.0.0.13")
    starts = json.loads((job.run / "starts.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [4, 3] and starts[1]["first_update"] > 0
    assert not (job.run / "owner.json").exists() and not (job.run / "REQUEUE").exists()
    assert job.weights() == alone.weights()
    cluster.command("scontrol", "update", "NodeName=127.0.0.13", "State=RESUME")


def test_a_run_goes_from_two_nodes_to_one_and_to_three(cluster: Cluster, alone: Job) -> None:
    """In three jobs with one folder, of which two are cancelled."""
    folder = ("--output-dir", str(cluster.directory / "runs" / "moved"))
    for nodes in (2, 1, 3):
        job = cluster.submit("train.sbatch", *WORDS, *folder, options=f"--nodes={nodes}", PROCESSES_PER_NODE="1")
        job.run = cluster.directory / "runs" / "moved"
        job.trains_on()
        if nodes < 3:
            cluster.command("scancel", job.number)
            assert job.ended() == "CANCELLED"
    assert job.result()["world_size"] == 3 and job.weights() == alone.weights()
    starts = json.loads((job.run / "starts.json").read_text())["starts"]
    assert [start["processes"] for start in starts] == [2, 1, 3]
