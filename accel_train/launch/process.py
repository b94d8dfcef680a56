"""This process, its host and its cores, and the processes above it: the launcher, the shell, Slurm. Without torch.

A process number alone does not tell whether a process still exists, as it is reused.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from accel_train.errors import print_line
from accel_train.files import open_to_write, read_regular_file, read_yaml

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def is_first_process() -> bool:
    """Whether this process prints messages for all. Inside a Slurm task, the rank of a launcher counts."""
    ranks = [os.environ[name] for name in RANK_VARIABLES if name in os.environ]
    return not ranks or ranks[0] == "0"


def job_id() -> str:
    """The job of this process as its batch system names it: 123, 123_4 (of an array), 5[4].server (PBS); or ""."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # SLURM_JOB_ID of one element is the number of the whole array
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}"
    return os.environ.get("SLURM_JOB_ID", os.environ.get("PBS_JOBID", ""))


WARNED, ENDED, CODE, RUN, NODES = "warned", "ended", "exit-code", "run", "nodes"
"""What is in `start_folder`: written by the script when the batch system warns of the job's end and when it ends the
job; by the first process that has ended, its exit code; by the run's owner, the run's folder; an empty file for each
node that a task has reached."""
MARKER = "REQUEUE"
"""A file there, and in the run's folder, that asks the job script to start the run again. It says the update."""


def start_folder() -> Path | None:
    """The folder through which a job script and its training talk, one for each start of the job; None without one.

    It is runs/starts/JOB/TIME, where JOB is the job, or under PBS the first of a chain of jobs.
    """
    folder = os.environ.get("ACCEL_TRAIN_START", "")
    return Path(folder) if folder else None


def tell_job_script(name: str, text: object) -> None:
    """Write a file for the job script, unless there is one already. Nothing fails if it cannot be written."""
    if (folder := start_folder()) is not None:
        with contextlib.suppress(OSError), open_to_write(folder / name, "xb") as file:
            file.write(f"{text}\n".encode(errors="surrogateescape"))


def available_cores() -> int:
    """Cores that this process may really use, not those that the machine has."""
    return len(core_set())


def core_set() -> set[int]:
    """The numbers of these cores."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def share_of_cores(mine: set[int], everyone: Sequence[set[int]]) -> int:
    """How many cores of `mine` are this process's part, where each is divided among those of `everyone` (the processes
    of this host, this one among them) that may use it: all of them where each process is bound to cores of its own."""
    return max(1, int(sum(1 / sum(core in each for each in everyone) for core in mine) + 1e-6))


def ranges(ranks: Iterable[int]) -> str:
    """Numbers for a message: 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def hostname() -> str:
    """The name of this host as the batch system knows it."""
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def machine_id() -> str:
    """An identifier of this boot of this host and, in a container, of the container's own process numbers.

    Process numbers can be compared only between processes with the same identifier.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux
        boot, namespace = f"{psutil.boot_time():.0f}", ""
    return f"{platform.node()} {boot} {namespace}".strip()


def start_time(pid: int) -> str:
    """When the process with that number began, for comparison only; "" if it does not exist or the system hides it."""
    return _zombie_and_start(pid)[1]


def has_ended(pid: int, started: str) -> bool:
    """Whether the process that had this number and start time (see `start_time`) has certainly ended."""
    if pid <= 0:  # these numbers mean groups of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it belongs to another user
    is_zombie, current = _zombie_and_start(pid)
    return is_zombie or bool(current and started and current != started)


def _zombie_and_start(pid: int) -> tuple[bool, str]:
    """Whether a process is a zombie (it has ended, but its parent has not waited for it), and when it began."""
    try:
        if Path("/proc/self/stat").exists():
            # Not psutil: its create_time() is a time of day on Linux, and shifts when the clock is set. The kernel's
            # own number, in clock ticks since the boot, never changes (proc_pid_stat(5), field 22).
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return state in "ZX", fields[18]
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE, repr(process.create_time())
    except (OSError, LookupError, psutil.Error):
        return False, ""


def write_stacks(path: Path, heading: str) -> None:
    """Write the stacks of all threads of this process into the file `path`, below `heading`.

    An error is only a warning: the run ends anyway.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        with open_to_write(path, "wb") as file:
            file.write(f"{heading}\n\n".encode())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError as error:
        print_line(f"accel-train: warning: the stacks cannot be written: {error}", sys.__stderr__)


LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
GPU_OPTIONS = {"--gpu_ids", "--gpu-ids"}
"""Options of accelerate launch that ask for a GPU. MULTI_GPU is none: it starts several processes on CPUs, too, which
MULTI_CPU does not (accelerate_configs/multi_cpu.yaml)."""


def parent_process() -> tuple[psutil.Process, list[str]]:
    """The process that started this one, and the words of its command line. Raises psutil.Error."""
    parent = psutil.Process(os.getppid())
    return parent, parent.cmdline()


def ancestors() -> list[str]:
    """The names by which the processes above this one were called, the nearest first, as far as this user may see
    them."""
    found: list[str] = []
    number = os.getppid()
    with contextlib.suppress(OSError, ValueError):  # hidden from this user, or not Linux
        while number > 0:
            found.append(Path(f"/proc/{number}/cmdline").read_text(errors="replace").partition("\0")[0])
            number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])  # proc_pid_stat(5)
    return found


def is_slurm_task(above: Iterable[str]) -> bool | None:
    """Whether srun made the step of this process, perhaps through scripts and launchers; None if its ancestors do not
    show it.

    Variables cannot tell: what `srun` and `sbatch` start inherits those of the step in which they were called. But the
    process that starts a step, slurmstepd, has the step's name as its command line: "slurmstepd: [4711.batch]", or
    `interactive` or `extern`, or a number if srun made the step.
    """
    for name in above:
        if step := re.match(r"slurmstepd: \[[^]]*?\.(\w+)", name):
            return step[1].isdigit()
    return None


def has_terminal() -> bool:
    """Whether this process belongs to a terminal, as in a shell of `srun --pty` that somebody types in."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
        return True
    return False


def is_launcher(command: list[str]) -> bool:
    """Whether a command line is one of accelerate launch or torchrun."""
    return not LAUNCHERS.isdisjoint(Path(word).name for word in command)


def launcher_command() -> list[str]:
    """The command line of the launcher that started this process; [] if there is none or it cannot be read."""
    try:
        _, command = parent_process()
    except psutil.Error:
        return []
    return command if is_launcher(command) else []


def gpu_asked_for(file: str | None) -> str | None:
    """What asks for a GPU, in words: an option of `accelerate launch`, or a setting of its config file; else None.

    `file`: the config file of a process without a launcher. torchrun and no launcher at all ask for nothing, and nor
    does a precision: bf16 is computed on CPUs, too.
    """
    command = launcher_command()
    if command:
        environment: dict[str, str] = {}
        with contextlib.suppress(psutil.Error):
            environment = parent_process()[0].environ()
        if {"--cpu", "--use_cpu"} & set(command) or is_yes(environment.get("ACCELERATE_USE_CPU")):
            return None
        if option := next((word for word in command if word.partition("=")[0] in GPU_OPTIONS), None):
            return option
        if not any("accelerate" in Path(word).name for word in command):
            return None  # torchrun
        from accelerate.commands.config import default_config_file

        # Given no file, the launcher reads the one that `accelerate config` writes, if there is one.
        file = _on_line(command, "config_file") or str(default_config_file)
    if file is None or is_yes((values := _config(file)).get("use_cpu")):
        return None
    return None if values.get("gpu_ids") is None else f"gpu_ids: {values['gpu_ids']} in {file}"


def _on_line(command: list[str], option: str) -> str | None:
    """The value of an option on a command line; None if it is not there."""
    spellings = (f"--{option}", f"--{option.replace('_', '-')}")
    for word, following in pairwise([*command, ""]):
        key, equals, value = word.partition("=")
        if key in spellings:
            return value if equals else following
    return None


def _config(file: str) -> dict[str, object]:
    """The settings of a config file of accelerate's; {} if it cannot be read."""
    import yaml

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        values = read_yaml(read_regular_file(Path(file), follow=True))
        return values if isinstance(values, dict) else {}
    return {}


def is_yes(value: object) -> bool:
    """Whether the value of a switch, in a variable or in a file of Accelerate's, turns it on."""
    return str(value).lower() in ("1", "true", "yes", "on")


def only_launcher_set(variable: str, option: str | None = None) -> bool:
    """Whether accelerate launch or torchrun set a variable to its own default (OMP_NUM_THREADS=1, say).

    That is so if the launcher was started without that variable, and without `option` on its command line.
    """
    if variable not in os.environ or not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & os.environ.keys():
        return False
    try:
        parent, command = parent_process()
        environment = parent.environ()
    except psutil.AccessDenied:  # not a launcher of this user, but a daemon of the batch system
        return False
    except psutil.Error:  # the parent is hidden or has ended
        return True
    # A job script, too, may set the variables of accelerate launch.
    return is_launcher(command) and variable not in environment and not (option and any(option in c for c in command))


def restart_count() -> str:
    """How often the launcher has restarted its processes, which tells their attempts apart in a store that it keeps."""
    keeps = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps else "0"
