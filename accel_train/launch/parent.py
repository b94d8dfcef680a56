"""The processes above this one: accelerate launch, torchrun, the shell, Slurm; and the signals that ask for a stop.

Importing torch takes seconds. A cluster's warning that came during that time would kill the program, or be lost where
the job script ignores it. So it is recorded here, without torch, and `run.stopping.StopRequests` obeys it later.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from accel_train.launch.process import WARNED, start_folder
from accel_train.untrusted import read_regular_file, read_yaml

LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
GPU_OPTIONS = {"--gpu_ids", "--gpu-ids"}
"""Options of accelerate launch that ask for a GPU. MULTI_GPU is none: it starts several processes on CPUs, too, which
MULTI_CPU does not (accelerate_configs/multi_cpu.yaml)."""


def parent_process() -> tuple[psutil.Process, list[str]]:
    """The process that started this one, and the words of its command line. Raises psutil.Error."""
    parent = psutil.Process(os.getppid())
    return parent, parent.cmdline()


@dataclass(frozen=True)
class Ancestor:
    """A process above this one."""

    pid: int
    command: list[str]
    """The words of its command line."""
    owns_terminal: bool = False
    """Whether a terminal was opened for it, as for the first shell in a window and for what `srun --pty` starts."""


def ancestors() -> list[Ancestor]:
    """The processes above this one, the nearest first, as far as this user may see them."""
    found: list[Ancestor] = []
    number = os.getppid()
    with contextlib.suppress(OSError, ValueError):  # hidden from this user, or not Linux
        while number > 0:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5)
            command = Path(f"/proc/{number}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            found.append(Ancestor(number, command, fields[3] == str(number) and fields[4] != "0"))
            number = int(fields[1])
    return found


def is_slurm_task(above: Iterable[Ancestor], task: str) -> bool | None:
    """Whether srun started this process, perhaps through scripts and launchers; None if its ancestors do not show it.

    Variables cannot tell: what `srun` and `sbatch` start inherits those of the step in which they were called. But the
    process that starts a step, slurmstepd, has the step's name as its command line: "slurmstepd: [4711.batch]", or
    `interactive` or `extern`, or a number if srun made the step. In the last case it may be a person who starts this
    process, in a shell of `srun --pty`. `task`: the number of the process that the step has started, if it is known
    (SLURM_TASK_PID): such a shell counts also where slurmstepd, which belongs to root, is hidden.
    """
    in_shell = False
    for ancestor in above:
        step = re.match(r"slurmstepd: \[[^]]*?\.(\w+)", ancestor.command[0])
        if step:
            return step[1].isdigit() and not in_shell
        words = ancestor.command[1:]
        has_script = not all(word.startswith("-") for word in words) and "-i" not in words
        in_shell = in_shell or (ancestor.owns_terminal and not has_script)
        if in_shell and str(ancestor.pid) == task:
            return False
    return None


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


def asked_of_accelerate(command: list[str], name: str) -> int | None:
    """The number that `accelerate launch` was given for an option such as num_processes, on its command line or in the
    config file that it names; None if neither says one."""
    given: object = _on_line(command, name)
    if given is None and (file := _on_line(command, "config_file")):
        given = _config(file).get(name)
    return int(str(given)) if str(given).isdecimal() else None


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
    """How often the launcher has restarted its processes, which tells their attempts apart in a store that it keeps.

    Each agent of torchrun counts for itself, so that those of one world may differ. But then each attempt has a store
    of its own: see docs/clusters.md, "Agents that come and go".
    """
    keeps = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps else "0"


def elastic_id() -> str:
    """The --rdzv-id of agents of torchrun that restart their processes when one fails (--max-restarts), else ""."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return os.environ.get("TORCHELASTIC_RUN_ID", "") if restarts else ""


def other_agents_restart() -> bool:
    """Whether this process belongs to several such agents: if one is lost, the others go on."""
    return bool(elastic_id()) and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def elastic_advice() -> str | None:
    """A warning if an agent of torchrun that joins later could not meet the others; else None."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not elastic_id():
        return None
    if not any("c10d" in word for word in launcher_command()):
        return None
    return (
        "the launcher shares its store with its processes, so that an agent that joins later, or takes rank 0's place, "
        "cannot meet the others: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for all agents (docs/clusters.md)"
    )


WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that clusters send. Ctrl-C is not one of them: before there is something to save, it ends the program."""

ENDINGS = (signal.SIGHUP, signal.SIGXCPU)
"""Of a terminal or ssh session that closes, and of a limit of processor time (`ulimit -t`)."""

FROM_LAUNCHER = ("SIGTERM", "SIGHUP")
"""The signals that a launcher passes on to its ranks when it ends. It sends SIGKILL 30 s later."""

recorded: list[int] = []
"""Those that have come until now."""


def recorded_stop_signal() -> str:
    """The name of the latest warning that was recorded, or ""."""
    return signal.Signals(recorded[-1]).name if recorded else ""


def warning_to_job_script() -> str:
    """What to call the warning that the job script has noted during this start of the job; "" if there was none."""
    start = start_folder()
    return "the warning before the job's end" if start is not None and (start / WARNED).exists() else ""


def stop_signals() -> list[signal.Signals]:
    """The signals that ask this process for a stop: of ENDINGS, those that would otherwise end it.

    So nohup's choice to ignore SIGHUP holds, and so does the handler of a program that embeds this one.
    """
    return [
        *WARNINGS,
        *(number for number in ENDINGS if signal.getsignal(number) in (signal.SIG_DFL, record_stop_signal)),
    ]


def record_stop_signal(number: int, _frame: Any = None) -> None:
    """Record a warning; a signal's handler."""
    recorded.append(number)
