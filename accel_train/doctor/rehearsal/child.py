"""A launch of the same kind as this one, on this host alone: what happens to it would happen to the real one.

This program's own launcher is never signalled: that would end the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import psutil

from accel_train.launch.parent import LAUNCHERS, launcher_command, parent_process

OF_LAUNCHERS = re.compile(
    "RANK$|WORLD_SIZE$|GROUP_|ROLE_|LOCAL_|MASTER_|TORCHELASTIC_|SLURM_|PBS_|PMI|OMPI_|ACCEL_TRAIN_START$"
)
END_SECONDS = 10.0


def child_command(processes: int, *program: str) -> list[str]:
    """The command that starts `python -m PROGRAM` in so many processes with this process's own launcher and options.

    Without a launcher it is one process. Raises ValueError if the launcher's command line cannot be read.
    """
    words = launcher_command()
    if not words:
        return [sys.executable, "-m", *program]
    try:
        return _relaunched(words, processes, program)
    except (SystemExit, StopIteration) as error:  # argparse ends the program at options that it does not know
        raise ValueError(f"the launcher's command line is {' '.join(words)[:100]!r}") from error


def _relaunched(words: list[str], processes: int, program: Sequence[str]) -> list[str]:
    name = next(index for index, word in enumerate(words) if os.path.basename(word) in LAUNCHERS)  # noqa: PTH119
    if words[name].endswith("accelerate"):
        name += 1  # accelerate launch
    start, given = words[: name + 1], words[name + 1 :]
    if "torchrun" in words[name] or words[name].endswith("distributed.run"):
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(given)
        one_host = ["--nnodes=1", f"--nproc-per-node={processes}", "--rdzv-backend=c10d", "--rdzv-id=doctor"]
        one_host += ["--rdzv-endpoint=127.0.0.1:0"]
    else:
        from accelerate.commands.launch import launch_command_parser

        parsed = launch_command_parser().parse_args(given)
        one_host = ["--num_machines=1", f"--num_processes={processes}", "--machine_rank=0"]
        one_host += ["--main_process_ip=127.0.0.1", "--main_process_port=0"]
    options = given[: len(given) - len(parsed.training_script_args) - 1]
    kept = [word for word in options if word not in ("-m", "--module", "--no_python", "--no-python")]
    return [*start, *kept, *one_host, "--module", *program]  # of an option that is given twice, the last one counts


def child_environment() -> dict[str, str]:
    """The variables of this program's launcher, or of this process if it has none, without those of its processes."""
    environment = dict(os.environ)
    if launcher_command():
        with contextlib.suppress(psutil.Error):
            environment = parent_process()[0].environ()
    return {name: value for name, value in environment.items() if not OF_LAUNCHERS.match(name)}


class Child:
    """A running launch, with all processes that it has started."""

    def __init__(self, command: Sequence[str]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- read by `text`
        self.popen = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C at the terminal is for the doctor
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher and all its processes, as Slurm does to those of a step."""
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _tree(self) -> list[psutil.Process]:
        try:
            launcher = psutil.Process(self.popen.pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End all of them at once, as when a node is lost."""
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=END_SECONDS)
        self.popen.wait()

    def text(self) -> str:
        """What they have printed."""
        self._output.seek(0)
        return self._output.read()


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Child]:
    """Start a launch; nothing of it is left when the context ends."""
    child = Child(command)
    try:
        yield child
    finally:
        child.kill()
