"""How this process was launched: the launcher's variables, mapped to those that Accelerate reads, or a clear error.

Accelerate reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun and
`accelerate launch` set. Tasks of Slurm and MPI have variables of other names; they are mapped here, before torch is
imported. The worst failure is N processes that each train alone: there is no error, and every result is wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from accel_train.errors import UserError, how_to_get, print_line
from accel_train.files import read_stripped
from accel_train.launch.process import (
    ancestors,
    available_cores,
    has_terminal,
    is_first_process,
    is_launcher,
    is_slurm_task,
    only_launcher_set,
    parent_process,
    start_time,
)

MPI_VARIABLES = (  # rank, world size, local rank, local world size
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("Intel MPI or MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# How often a thread of GNU OpenMP (torch's on Linux) checks for new work before it sleeps. This takes some 50 us, the
# time between two operations of a network; to wake a sleeping thread takes longer. Threads that spin for the default of
# 3 ms take cores away from a busy neighbour (docs/benchmarks.md).
SPINS = "5000"
INTERRUPTED = 130  # exit code after Ctrl-C
NEED_NO_MAPPING = ("none", "accelerate", "torchrun", "environment")  # launchers that set what Accelerate reads


@dataclass(frozen=True)
class Launch:
    """How this process was started. It is number `rank` of all processes, and number `local_rank` on its node."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    agent: tuple[int, str] | None = field(default=None, compare=False, kw_only=True)
    """The process of accelerate launch or torchrun that started this one: its number and start time (`process`)."""
    began: float = field(default_factory=time.time, compare=False, kw_only=True)
    """When this process asked how it was started, which it does before it imports torch; seconds since 1970."""

    def check_alone(self, command: str) -> None:
        """Raise UserError if there are several processes: the command `accel-train COMMAND` works in one."""
        if self.world_size > 1:
            raise UserError(
                f"accel-train {command} runs in one process, but {self.world_size} were started; use no launcher."
            )


def print_error(error: UserError, program: str = "accel-train") -> None:
    """Print a mistake on stderr, one line each, on the process that has to say it."""
    if is_first_process() or not error.every_process:
        for message in error.messages:
            print_line(f"{program}: error: {message}", sys.stderr)


def prepare_environment(*, bitwise: bool = False) -> Launch:
    """Detect the launcher, and set the variables that Accelerate and OpenMP read. Call it before torch is imported.

    Variables that the user has set are not changed. `bitwise`: one thread for each process, however many there are,
    because their number decides in which order a process sums; and a cuBLAS that sums in one order. Raises UserError if
    the launcher announced other processes than it has started.
    """
    env = os.environ
    launch = _detect(env)
    _check_promise(launch, env)
    launch = replace(launch, agent=_agent(launch))
    if launch.launcher not in NEED_NO_MAPPING:
        address, port = _rendezvous_address(launch, env)
        env.setdefault("MASTER_ADDR", address)
        env.setdefault("MASTER_PORT", str(port))
        env["RANK"], env["WORLD_SIZE"] = str(launch.rank), str(launch.world_size)
        env["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
        env["LOCAL_RANK"] = str(launch.local_rank)  # accelerator.py makes it the index of a device
    if "OMP_WAIT_POLICY" not in env:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env.setdefault("GOMP_SPINCOUNT", SPINS)
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: without, allocation can cost more than computing
    if "OMP_NUM_THREADS" not in env or only_launcher_set("OMP_NUM_THREADS", "num_cpu_threads_per_process"):
        env["OMP_NUM_THREADS"] = "1" if bitwise else str(_threads(launch, env))
    if bitwise:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # docs.nvidia.com/cuda/cublas, "Results reproducibility"
    return launch


def in_job() -> bool:
    """Whether this process belongs to a batch job of Slurm or PBS."""
    return not {"SLURM_JOB_ID", "PBS_JOBID"}.isdisjoint(os.environ)


def at_terminal() -> bool:
    """Whether a person started this single process at a terminal, outside of a job and without a launcher."""
    launched = ("RANK", "ACCELERATE_MIXED_PRECISION", *(variables[0] for _, *variables in MPI_VARIABLES))
    alone = not in_job() and not any(name in os.environ for name in launched)
    return alone and (os.isatty(0) or os.isatty(2))


def _detect(env: Mapping[str, str]) -> Launch:
    """The launcher and the rank, from the variables `env`. Raises UserError if one of them is not a number."""
    number = partial(_number, env)
    accelerate = "ACCELERATE_MIXED_PRECISION" in env
    if "RANK" in env:  # a launcher inside a task of srun or mpirun decides
        name = "accelerate" if accelerate else "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
        world = (number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE", "1"))
        return Launch(name, *world)
    tasks = _slurm_tasks(env)
    for name, *variables in MPI_VARIABLES:
        of_slurm = variables[1] == "PMI_SIZE" and number("PMI_SIZE", "1") == tasks  # srun --mpi=pmi2
        if number(variables[1], "1") > 1 and variables[2] in env and not of_slurm:
            return Launch(name, *(number(variable) for variable in variables))
    if tasks > 1:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "1"))  # 4(x2),3
        counts: list[int] = []
        for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
            counts += [int(count)] * int(repeats or 1)
        local = counts[number("SLURM_NODEID")]
        return Launch("srun", number("SLURM_PROCID"), tasks, number("SLURM_LOCALID"), local)
    return Launch("accelerate" if accelerate else "none")


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    value = env.get(name, default)
    if not value.isdigit():
        raise UserError(
            f"The launcher should set {name} to a number, but it is {value!r}. Start the program with "
            "accelerate launch, torchrun, srun or mpirun, or unset RANK for a single process.",
            every_process=False,
        )
    return int(value)


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task, rather than a shell or script of sbatch, salloc or `srun --pty`.

    If the processes above this one do not tell (they may be hidden, or outside of a container), the variables are
    believed: a batch script has no step number, unless it was sent from a step, and an interactive step has one near
    2^32.
    """
    step = env.get("SLURM_STEP_ID", "")
    if not step.isdigit() or ("SLURM_PTY_PORT" in env and has_terminal()):
        return False
    is_task = is_slurm_task(ancestors())
    return int(step) < 2**31 if is_task is None else is_task


def _slurm_tasks(env: Mapping[str, str]) -> int:
    """How many tasks srun started, if this process is one of them; else 1."""
    if not _in_slurm_step(env):
        return 1
    return _number(env, "SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))


def _check_promise(launch: Launch, env: Mapping[str, str]) -> None:
    """Raise UserError if the variables contradict each other or the launcher. Asks no other process."""
    if launch == Launch("accelerate") and "RANK" not in env and only_launcher_set("MASTER_ADDR"):
        raise UserError(
            "accelerate launch was asked for several processes but started only one, as it always does with --cpu "
            "and with MULTI_CPU. Use --config_file accelerate_configs/multi_cpu.yaml instead."
            + how_to_get("accelerate_configs/multi_cpu.yaml")
        )
    promised = env.get("WORLD_SIZE", str(launch.world_size))
    if promised != str(launch.world_size) or launch.rank >= launch.world_size:
        raise UserError(
            f"WORLD_SIZE is {promised}, but this is process {launch.rank} of {launch.world_size} (launcher: "
            f"{launch.launcher}). Unset it, or start that many processes with a launcher.",
            every_process=False,
        )
    group_size = env.get("GROUP_WORLD_SIZE", "")
    if group_size and (launchers := str(_slurm_tasks(env))) not in ("1", group_size):
        raise UserError(
            f"srun started {launchers} launchers, but this one knows of {group_size}, so each would train alone. "
            "Give accelerate launch --multi_gpu, --num_machines, --machine_rank, --main_process_ip and "
            "--main_process_port, as slurm/train.sbatch does." + how_to_get("slurm/train.sbatch"),
            every_process=False,
        )


def _rendezvous_address(launch: Launch, env: Mapping[str, str]) -> tuple[str, int]:
    """The host and port of rank 0. The port is derived from the job and its step: each has its own."""
    hosts = allocated_hosts(env)
    if launch.local_world_size == launch.world_size:
        address = "127.0.0.1"
    elif hosts or "MASTER_ADDR" in env:
        address = hosts[0] if hosts else ""
    else:
        raise UserError(
            f"{launch.launcher} started processes on several hosts, but does not say which host has rank 0. Set "
            "MASTER_ADDR to the name of the first host for all of them (Open MPI: mpirun -x MASTER_ADDR …).",
            every_process=False,
        )
    job = re.match(r"\d+", env.get("SLURM_JOB_ID", env.get("PBS_JOBID", "")))
    # mpirun may start the ranks of other hosts, and only these, through a step
    part = _number(env, "SLURM_STEP_ID", "0") if launch.launcher == "srun" else 0
    # Below 32768, where Linux begins to assign ports itself. A job that is started again takes a different port, as in
    # slurm/train.sbatch, because it may have failed because its port was taken.
    number = int(job[0]) if job else 0
    return address, 20000 + (number + 2003 * part + 1009 * _number(env, "SLURM_RESTART_COUNT", "0")) % 10000


def allocated_hosts(env: Mapping[str, str]) -> list[str]:
    """The hosts of this job, in the batch system's order; empty if it does not list them."""
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if _in_slurm_step(env):
        nodes = env.get("SLURM_STEP_NODELIST", nodes)
    if nodes:
        scontrol = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.run(scontrol, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):  # no scontrol in a container: only the first of n[003-005,9],m
            return [re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])]
    return list(dict.fromkeys(read_stripped(Path(env.get("PBS_NODEFILE", "")), follow=True).split()))


def _threads(launch: Launch, env: Mapping[str, str]) -> int:
    """The number of threads: the cores that this process may use, divided by the processes that share them."""
    cores = available_cores()
    node = int(env.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
    if launch.launcher not in NEED_NO_MAPPING and cores * launch.local_world_size <= node:
        return cores  # srun or mpirun has bound each task to its own cores
    return max(1, cores // launch.local_world_size)


def _agent(launch: Launch) -> tuple[int, str] | None:
    """The launcher's process number and start time, if the launcher is this process's parent."""
    if launch.launcher not in ("accelerate", "torchrun"):
        return None
    with contextlib.suppress(psutil.Error):
        parent, command = parent_process()
        if is_launcher(command):
            return parent.pid, start_time(parent.pid)
    return None
