"""The variables of launchers are understood; a wrong number of processes is an error, never N runs of one process."""

import contextlib
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path

import helpers
import pytest
from worlds import PROGRAM, environment, finish, start

from accel_train.errors import UserError
from accel_train.launch.environment import (
    Launch,
    _check_promise,
    _detect,
    _rendezvous_address,
    _threads,
    allocated_hosts,
)

# What the launchers set: seen on Slurm 22.05 and Open MPI 4.1, documented by Intel MPI and MPICH.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[003-004],m1",
}  # fmt: skip
STEP = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch()),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, Launch("accelerate")),
        (TORCHRUN, Launch("torchrun", 1, 2, 1, 2)),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "bf16"}, Launch("accelerate", 1, 2, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Launch("environment", 3, 4, 0, 1)),
        (STEP, Launch("srun", 3, 4, 1, 2)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,3"}, Launch("srun", 3, 4, 1, 3)),
        (STEP | {"ACCELERATE_MIXED_PRECISION": "bf16"}, Launch("srun", 3, 4, 1, 2)),  # one launcher a task
        (STEP | TORCHRUN | {"GROUP_WORLD_SIZE": "4"}, Launch("torchrun", 1, 2, 1, 2)),
        (BATCH_SCRIPT, Launch()),  # python without srun
        (BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, Launch()),  # salloc's interactive step
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, Launch()),
        (OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2)),
        (INTEL_MPI, Launch("Intel MPI or MPICH", 3, 4, 1, 2)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2)),
        (
            STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | INTEL_MPI,
            Launch("Intel MPI or MPICH", 3, 4, 1, 2),
        ),
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Launch("srun", 3, 4, 1, 2)),  # srun --mpi=pmi2
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, Launch()),
    ],
)
def test_what_launchers_set_is_understood(env: dict[str, str], expected: Launch) -> None:
    found = _detect(env)
    assert found == expected
    _check_promise(found, env)


STEPD = "slurmstepd: [4711.{}]"
TASK = Launch("srun", 3, 4, 1, 2)
PTY = STEP | {"SLURM_PTY_PORT": "40123"}


@pytest.mark.parametrize(
    ("above", "typed", "env", "expected"),
    [
        (["bash", STEPD.format(0)], False, PTY, TASK),  # srun in a shell of srun --pty
        ([STEPD.format("12+1")], False, PTY, TASK),
        (["/bin/bash", STEPD.format(0)], True, PTY, Launch()),
        (["-bash"], True, PTY, Launch()),  # slurmstepd is hidden
        ([], False, PTY, TASK),  # all are hidden
        ([""], True, STEP, TASK),  # a container
        (["bash", STEPD.format("batch")], False, STEP, Launch()),
        ([STEPD.format("interactive")], False, STEP, Launch()),
        ([STEPD.format("extern")], False, STEP, Launch()),
    ],
)
def test_the_process_that_started_a_step_says_what_it_is(
    above: list[str], typed: bool, env: dict[str, str], expected: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accel_train.launch.environment.has_terminal", lambda: typed)
    monkeypatch.setattr("accel_train.launch.environment.ancestors", lambda: above)
    assert _detect(env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE to a number"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK to a number, but it is 'x'"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but this is process 0 of 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "process 2 of 2"),
        (STEP | {"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but this is process 3 of 4"),
        # srun started four launchers, each of which made a world of its own
        (STEP | TORCHRUN, "srun started 4 launchers, but this one knows of 1"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_an_error(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _check_promise(_detect(env), env)


def test_rank_0_is_on_the_first_node_and_each_job_has_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no scontrol
    launch = Launch("srun", 3, 4, 1, 2)
    assert _rendezvous_address(launch, STEP) == ("n003", 24711)
    assert _rendezvous_address(launch, STEP | {"SLURM_RESTART_COUNT": "1"}) == ("n003", 25720)  # started again
    assert _rendezvous_address(launch, STEP | {"SLURM_STEP_ID": "1"}) == ("n003", 26714)  # beside step 0
    sent = {"SLURM_STEP_NODELIST": "other", "SLURM_STEP_ID": "0"}  # inherited by a batch script that a step has sent
    monkeypatch.setattr("accel_train.launch.environment.ancestors", lambda: ["slurmstepd: [4712.batch]"])
    assert allocated_hosts(STEP | sent) == ["n003"]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    for nodes, first in {"a": "a", "a1,b[2-3]": "a1", "r[1-2]n[07,09],x": "r1n07"}.items():
        assert _rendezvous_address(launch, STEP | {"SLURM_STEP_NODELIST": nodes})[0] == first
    assert _rendezvous_address(Launch("srun", 1, 2, 1, 2), STEP)[0] == "127.0.0.1"
    with pytest.raises(UserError, match="MASTER_ADDR"):
        _rendezvous_address(Launch("Open MPI", 3, 4, 1, 2), OPEN_MPI)


def test_threads_are_shared_unless_tasks_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert _threads(Launch("torchrun", 0, 4, 0, 4), {}) == 2
    assert _threads(Launch("torchrun", 0, 16, 0, 16), {}) == 1
    assert _threads(Launch(), {}) == 8
    assert _threads(Launch("srun", 0, 4, 0, 4), {"SLURM_CPUS_ON_NODE": "8"}) == 2  # not bound
    assert _threads(Launch("srun", 0, 4, 0, 4), {"SLURM_CPUS_ON_NODE": "32"}) == 8  # bound to 8 of 32
    assert _threads(Launch("Open MPI", 0, 4, 0, 4), {}) == 8


@pytest.mark.ci
def test_the_environment_is_prepared_without_torch() -> None:
    program = (
        "import os, sys; from accel_train.launch.environment import prepare_environment; prepare_environment()\n"
        "assert 'torch' not in sys.modules\n"
        "print(*(os.environ.get(name) for name in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_PORT "
        "OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT'.split()))"
    )
    for variables, expected in (
        ({"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE"}, "None None None None None 5 ACTIVE None"),
        ({"OMP_NUM_THREADS": "5", "GOMP_SPINCOUNT": "9"}, "None None None None None 5 PASSIVE 9"),
        (STEP | {"OMP_NUM_THREADS": "1"}, "3 4 1 2 24711 1 PASSIVE 5000"),
        # set by a job script that also says the precision, with no launcher in between
        (STEP | {"OMP_NUM_THREADS": "7", "ACCELERATE_MIXED_PRECISION": "no"}, "3 4 1 2 24711 7 PASSIVE 5000"),
        (STEP | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "3 4 1 2 24711 1 PASSIVE 5000"),
        (STEP | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1234"}, "3 4 1 2 1234 1 PASSIVE 5000"),
    ):
        codes, _, text = finish(start(sys.executable, "-c", program, **variables))
        assert (codes, text.strip()) == ([0], expected)


@pytest.mark.ci
def test_torchrun_makes_one_world_and_may_restart_it() -> None:
    codes, worlds, text = finish(
        start(
            "torchrun",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            PROGRAM,
            FAIL_ONCE="1",
            LATE_RANK="1",
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS="7",
        )
    )
    assert codes == [0], text
    assert [world["rank"] for world in worlds] == [0, 1]
    assert all(world["launcher"] == "torchrun" and world["sum"] == world["world_size"] == 2 for world in worlds)
    assert all(world["accumulation"] == 3 and world["split_batches"] for world in worlds)
    # torchrun's own default, OMP_NUM_THREADS=1, gives way to the share of the cores
    assert worlds[0]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun (Open MPI) is not installed")
def test_mpirun_makes_one_world() -> None:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    codes, worlds, text = finish(
        start("mpirun", "-n", "2", "--oversubscribe", sys.executable, PROGRAM, OMP_NUM_THREADS="1", **as_root)
    )
    assert codes == [0], text
    assert [(w["launcher"], w["rank"], w["sum"], w["local"]) for w in worlds] == [
        ("Open MPI", 0, 2, [0, 2]),
        ("Open MPI", 1, 2, [1, 2]),
    ]


@pytest.mark.ci
@pytest.mark.parametrize("rendezvous", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_two_launchers_make_one_world(rendezvous: str) -> None:
    """Two "hosts", as over ssh, the first of which is called 127.0.0.2."""
    port = helpers.free_port()
    processes = []
    for rank in range(2):
        options = f"--num_machines=2 --num_processes=2 --machine_rank={rank} --main_process_ip=127.0.0.2"
        options += f" --main_process_port={port} --rdzv_backend={rendezvous} --multi_gpu"
        config = str(helpers.ROOT / "accelerate_configs" / "multi_node.yaml")
        line = ["-m", "accelerate.commands.launch", "--config_file", config, *options.split(), PROGRAM]
        processes.append(helpers.Captured(line, environment(OMP_NUM_THREADS="1")))
        # with c10d the first to come listens; here, where both have its address, that could be the second node
        wait_for_listener(port)
    codes, worlds, text = finish(*processes)
    assert codes == [0, 0], text
    assert [(world["launcher"], world["sum"]) for world in worlds] == [("accelerate", 2), ("accelerate", 2)]


def wait_for_listener(port: str) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.2", int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens on port {port}")


def by_hand(rank: int, port: str, world_size: int = 2, *words: str, **variables: str) -> helpers.Captured:
    """One of several processes: `python WORDS` (PROGRAM), forked."""
    world = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    world |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    return helpers.Captured(words or [PROGRAM], environment(**world, **variables))


@pytest.mark.ci
def test_a_missing_process_is_named() -> None:
    port = helpers.free_port()
    present = [by_hand(rank, port, 4, RENDEZVOUS_SECONDS="8") for rank in (0, 2)]
    codes, worlds, text = finish(*present)
    assert codes == [2, 2] and not worlds, text
    assert "2 of 4 processes met within 8 s" in text
    assert "Missing: ranks 1,3." in text


@pytest.mark.slow
def test_rank_0_missing_port_taken_rank_twice_and_world_unlike() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        alone = by_hand(1, helpers.free_port(), RENDEZVOUS_SECONDS="3")
        blocked = by_hand(0, str(listener.getsockname()[1]), RENDEZVOUS_SECONDS="3")
        port = helpers.free_port()
        twins = [by_hand(1, port, 3, RENDEZVOUS_SECONDS="8") for _ in range(2)] + [
            by_hand(0, port, 3, RENDEZVOUS_SECONDS="8")
        ]
        port = helpers.free_port()
        unlike = [by_hand(rank, port, 2 + rank, RENDEZVOUS_SECONDS="8") for rank in range(3)]
        codes, _, text = finish(alone)
        assert codes == [2] and "Rank 1" in text and "found nobody at 127.0.0.1" in text
        codes, _, text = finish(blocked)
        assert codes == [2] and "cannot open the store" in text and "MASTER_PORT" in text
        codes, worlds, text = finish(*twins)
        assert codes == [2, 2, 2] and not worlds and "Rank 1 exists twice" in text
        codes, worlds, text = finish(*unlike[:2], unlike[2])
        assert codes[0] == 2 and not worlds and "expects 2 processes, but rank 1" in text


# The meeting alone, which needs no GPU: a process says which one it has; SIGNALLED: it gets SIGTERM while it waits.
MEETING = """
import os, signal, sys, threading
from accel_train.errors import UserError
from accel_train.launch import environment, rendezvous, stopping
rendezvous.AFTER_SIGTERM_SECONDS = 1.0
if "SIGNALLED" in os.environ:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
signal.signal(signal.SIGTERM, stopping.record_stop_signal)
try:
    store = rendezvous.rendezvous_of_ranks(environment.prepare_environment(), "GPU-1", 100)
except UserError as error:
    print(error)
"""


@pytest.mark.ci
def test_two_processes_on_one_gpu_are_an_error_and_sigterm_shortens_the_wait() -> None:
    """Else a rank that finds nobody waits for --rendezvous-timeout-seconds, beside the next start of the job."""
    port = helpers.free_port()
    told = [by_hand(rank, helpers.free_port(), 2, "-c", MEETING, SIGNALLED="1") for rank in range(2)]
    _, _, text = finish(*(by_hand(rank, port, 2, "-c", MEETING) for rank in range(2)))
    assert "Ranks 0-1 on " in text and "share one GPU (GPU-1)" in text and "--share-gpus true" in text
    _, _, text = finish(*told)
    assert "1 of 2 processes met within " in text and "Missing: ranks 1. SIGTERM came meanwhile" in text
    assert re.search("found nobody at 127.0.0.1.*SIGTERM came meanwhile", text)


def test_processes_that_disagree_are_named() -> None:
    port = helpers.free_port()
    codes, worlds, text = finish(*(by_hand(rank, port, FACT_0="x" * 50, FACT_1="other") for rank in range(2)))
    assert codes == [2, 2] and not worlds
    assert re.search(
        r"do not agree: configuration is 'other' on ranks 1 \(\S+\), '50 characters with CRC \w+' on rank 0 ",
        text,
    )
    assert "versions" not in text


def test_an_output_directory_of_one_node_only_is_an_error(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    port = helpers.free_port()
    codes, worlds, text = finish(
        *(by_hand(r, port, SHARED_0=str(tmp_path / "one"), SHARED_1=str(tmp_path / "two")) for r in range(2))
    )
    assert codes == [2, 2] and not worlds and "is not shared by all nodes" in text
    assert not any((tmp_path / "one").iterdir())
