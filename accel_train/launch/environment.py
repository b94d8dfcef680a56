"""What the launcher promised: its variables, mapped to those that Accelerate reads, or a clear error.

Accelerate reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun
and `accelerate launch` set. Slurm's and MPI's tasks bring other names; they are mapped here, before torch is
imported. The failure to fear is N processes that each train alone: nothing errors, and every result is wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from accel_train.errors import UserError
from accel_train.launch.cores import available_cores
from accel_train.launch.process import started

MPI_VARIABLES = (  # rank, world size, local rank, local world size
    ("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("Intel MPI or MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Cray MPICH", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
)
LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
# How often a thread of GNU's OpenMP, torch's on Linux, looks for its next work before it sleeps: some 50 us, the time
# between two operations of a net, for to be woken takes longer. Threads that spin on, as by default for 3 ms, steal the
# cores of a busy neighbour (docs/benchmarks.md).
SPINS = "5000"
INTERRUPTED = 130  # the exit code of a program that Ctrl-C has ended
READY_MADE = ("none", "accelerate", "torchrun", "environment")  # launchers that need no mapping
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PBS_NODENUM")


@dataclass(frozen=True)
class Launch:
    """How this process was started: number `rank` of all, and number `local_rank` of those on its node."""

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    agent: tuple[int, str] | None = field(default=None, compare=False, kw_only=True)
    """The process of accelerate launch or torchrun that started this one: its number, and when it began."""


def is_first_process() -> bool:
    """Whether this process speaks for all that were started; a launcher inside a Slurm task decides."""
    ranks = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    return not ranks or ranks[0] == "0"


def prepare_environment() -> Launch:
    """Find the launcher, and set the variables that Accelerate and OpenMP read: before torch is imported.

    What the user has set stays as it is.

    Raises UserError if the launcher promises other processes than it has started.
    """
    env = os.environ
    launch = _detect(env)
    _check_promise(launch, env)
    launch = replace(launch, agent=_agent(launch))
    if launch.launcher not in READY_MADE:
        address, port = _rendezvous_address(launch, env)
        env.setdefault("MASTER_ADDR", address)
        env.setdefault("MASTER_PORT", str(port))
        env["RANK"], env["WORLD_SIZE"] = str(launch.rank), str(launch.world_size)
        env["LOCAL_WORLD_SIZE"] = str(launch.local_world_size)
        env["LOCAL_RANK"] = str(launch.local_rank)  # accelerator.py makes it the index of a device
    if "OMP_WAIT_POLICY" not in env:
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        env.setdefault("GOMP_SPINCOUNT", SPINS)
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: of 4 KB each, a large tensor's cost more than its sums
    if "OMP_NUM_THREADS" not in env or _only_launcher_set("OMP_NUM_THREADS", "num_cpu_threads_per_process"):
        env["OMP_NUM_THREADS"] = str(_threads(launch, env))
    return launch


def in_job() -> bool:
    """Whether this process belongs to a job of a cluster."""
    return not {"SLURM_JOB_ID", "PBS_JOBID"}.isdisjoint(os.environ)


def at_terminal() -> bool:
    """Whether a person started this process by itself at a terminal: in no job, and under no launcher."""
    launched = ("RANK", "ACCELERATE_MIXED_PRECISION", *(variables[0] for _, *variables in MPI_VARIABLES))
    alone = not in_job() and not any(name in os.environ for name in launched)
    return alone and (os.isatty(0) or os.isatty(2))


def _detect(env: Mapping[str, str]) -> Launch:
    number = partial(_number, env)
    accelerate = "ACCELERATE_MIXED_PRECISION" in env
    if "RANK" in env:  # a launcher within a task of srun's or mpirun's has the last word
        name = "accelerate" if accelerate else "torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment"
        world = (number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE", "1"))
        return Launch(name, *world)
    tasks = number("SLURM_NTASKS", "1") if _in_slurm_step(env) else 1
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
    return _pbs_task(env) or Launch("accelerate" if accelerate else "none")


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    value = env.get(name, default)
    if not value.isdigit():
        raise UserError(
            f"The launcher should set {name} to a number, but it is {value!r}: start the program with "
            "accelerate launch, torchrun, srun or mpirun; or unset RANK for a single process.",
            every_process=False,
        )
    return int(value)


def _pbs_task(env: Mapping[str, str]) -> Launch | None:
    """What pbsdsh has started: a process for each line of the node file. None for the job script and what it runs."""
    node = _number(env, "PBS_NODENUM", "0")  # which host
    # Which task of the job, in hexadecimal digits: 00000001 is the job script, the ninth that it starts 0000000A.
    if node == 0 and env.get("PBS_TASKNUM", "1").lstrip("0") == "1":
        return None
    file = env.get("PBS_NODEFILE", "")
    try:
        lines = Path(file).read_text().split()
    except OSError:
        raise UserError(
            f"pbsdsh started this process, but PBS_NODEFILE ({file!r}) cannot be read on this host: copy that file "
            "to a folder that all nodes see, and set PBS_NODEFILE to the copy in what pbsdsh starts.",
            every_process=False,
        ) from None
    if "PBS_VNODENUM" not in env and len(set(lines)) < len(lines):  # Torque has it
        raise UserError(
            f"pbsdsh started {len(lines)} processes on {len(set(lines))} hosts, and PBS does not tell those of one "
            "host apart: ask for mpiprocs=1, or use pbs/train.pbs or mpirun.",
            every_process=False,
        )
    rank = _number(env, "PBS_VNODENUM", str(node))
    host = lines[rank] if rank < len(lines) else ""
    return Launch("pbsdsh", rank, len(lines), lines[:rank].count(host), lines.count(host)) if len(lines) > 1 else None


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether this is a task of srun's, rather than a process of sbatch's, salloc's or a terminal's shell.

    All of them see SLURM_NTASKS and SLURM_PROCID. But a batch script has no number of a step, the shell of an
    interactive step has one near 2^32, and the shell of `srun --pty` has a terminal.
    """
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 2**31 and "SLURM_PTY_PORT" not in env


def _check_promise(launch: Launch, env: Mapping[str, str]) -> None:
    """Stop at what shows, without asking any other process, that the world is not the one that was meant."""
    if launch == Launch("accelerate") and "RANK" not in env and _only_launcher_set("MASTER_ADDR"):
        raise UserError(
            "accelerate launch was asked for several processes but started one, as it does with --cpu and "
            "with MULTI_CPU: use --config_file accelerate_configs/multi_cpu.yaml instead."
        )
    promised = env.get("WORLD_SIZE", str(launch.world_size))
    if promised != str(launch.world_size) or launch.rank >= launch.world_size:
        raise UserError(
            f"WORLD_SIZE is {promised}, but this is process {launch.rank} of {launch.world_size} (launcher: "
            f"{launch.launcher}): unset it, or start that many processes with a launcher.",
            every_process=False,
        )
    launchers, known = env.get("SLURM_STEP_NUM_TASKS", "1"), env.get("GROUP_WORLD_SIZE", "")
    if known and _in_slurm_step(env) and launchers not in ("1", known):
        raise UserError(
            f"srun started {launchers} launchers, but this one knows of {known}: each would train alone. "
            "Give accelerate launch --multi_gpu, --num_machines, --machine_rank, --main_process_ip and "
            "--main_process_port, as slurm/multi_node.sbatch does.",
            every_process=False,
        )


def _rendezvous_address(launch: Launch, env: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 listens: its host, and a port that follows from the job, so that two jobs differ."""
    hosts = allocated_hosts(env)
    if launch.local_world_size == launch.world_size:
        address = "127.0.0.1"
    elif hosts or "MASTER_ADDR" in env:
        address = hosts[0] if hosts else ""
    else:
        raise UserError(
            f"{launch.launcher} started processes on several hosts, but none knows where rank 0 is: set "
            "MASTER_ADDR to the name of the first host for all of them (Open MPI: mpirun -x MASTER_ADDR …).",
            every_process=False,
        )
    job = re.match(r"\d+", env.get("SLURM_JOB_ID", env.get("PBS_JOBID", "")))
    mpi_job = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    # Below the ports that Linux hands out by itself (from 32768 on). A job that is started again takes another, as in
    # slurm/common.sh: it may have failed because its port was taken.
    number = int(job[0]) if job else zlib.crc32(mpi_job.encode())
    return address, 20000 + (number + 1009 * _number(env, "SLURM_RESTART_COUNT", "0")) % 10000


def allocated_hosts(env: Mapping[str, str]) -> list[str]:
    """The hosts that the batch system gave to this job, in its order; empty if it does not say."""
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    if nodes:
        scontrol = ["scontrol", "show", "hostnames", nodes]
        try:
            return subprocess.run(scontrol, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):  # in a container: only the first of n[003-005,9],m
            return [re.sub(r"\[(\d+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])]
    try:
        return list(dict.fromkeys(Path(env.get("PBS_NODEFILE", "")).read_text().split()))
    except OSError:
        return []


def _threads(launch: Launch, env: Mapping[str, str]) -> int:
    """The cores that this process may use, divided among those that share them."""
    cores = available_cores()
    node = int(env.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
    if launch.launcher not in READY_MADE and cores * launch.local_world_size <= node:
        return cores  # srun and mpirun may have bound each task to cores of its own
    return max(1, cores // launch.local_world_size)


def _agent(launch: Launch) -> tuple[int, str] | None:
    """The launcher's process if it is our parent (slurm/rank.sh may stand between), told by its command line."""
    if launch.launcher not in ("accelerate", "torchrun"):
        return None
    parent = os.getppid()
    with contextlib.suppress(psutil.Error, OSError):
        line = psutil.Process(parent).cmdline()
        if any(word.endswith("slurm/rank.sh") for word in line):
            parent = psutil.Process(parent).ppid()
            line = psutil.Process(parent).cmdline()
        if {Path(word).name for word in line} & LAUNCHERS:
            return parent, started(parent)
    return None


def _only_launcher_set(variable: str, option: str | None = None) -> bool:
    """Whether accelerate launch or torchrun set a variable to a default of its own (OMP_NUM_THREADS=1, say).

    That is so if our parent (slurm/rank.sh may stand between) is such a launcher and was started without it, and
    without `option` in its command line.
    """
    if variable not in os.environ or not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        return False
    parent = Path(f"/proc/{os.getppid()}")
    try:
        line = (parent / "cmdline").read_text(errors="replace")
        if "slurm/rank.sh\0" in line:
            parent = Path(f"/proc/{(parent / 'stat').read_text().rpartition(')')[2].split()[1]}")
            line = (parent / "cmdline").read_text(errors="replace")
        before = (parent / "environ").read_text(errors="replace")
    except PermissionError:  # not a launcher of ours, but a daemon of the batch system
        return False
    except OSError:  # not Linux
        return True
    words = {Path(word).name for word in line.split("\0")}
    is_launcher = bool(words & LAUNCHERS)  # a job script, too, may set what accelerate launch sets
    return is_launcher and f"\0{variable}=" not in f"\0{before}" and (option is None or option not in line)
