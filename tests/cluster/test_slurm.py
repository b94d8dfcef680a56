"""The job scripts on a real Slurm: two nodes on this machine, real sbatch, real signals, real losses of nodes.

Skipped where Slurm's daemons are not installed (Debian: slurmctld, slurmd, slurm-client, munge).
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import helpers
import pytest
import wheel_environment

ROOT = helpers.ROOT
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch")
LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|MASTER_|SLURM|SBATCH|PMI|OMPI|PBS|ACCELERATE|OMP_|TORCHELASTIC|CUDA")
EPOCHS = 30  # of 30 updates: long enough for several interruptions

pytestmark = [
    pytest.mark.timeout(900),  # six starts of a run wait for one another in the longest, beside other tests
    pytest.mark.skipif(
        not all(shutil.which(program, path=PATH) for program in NEEDED),
        reason="Slurm and munge are not installed (slurmctld, slurmd, slurm-client, munge)",
    ),
]


class Cluster:
    def __init__(self, directory: Path, nodes: int = 2) -> None:
        self.directory, self.nodes = directory, nodes
        self.environment = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
        self.environment |= {
            "PATH": PATH,
            "ACCELERATE_CONFIG": str(ROOT / "accelerate_configs" / "multi_cpu.yaml"),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "DOCTOR": "off",  # the tests of the training need not wait for it
            # remember ended jobs until the last test; salloc opens a shell on the node
            "LOCAL_SLURM_CONF": "MinJobAge=3600\nLaunchParameters=use_interactive_step",
        }
        script = str(Path(__file__).with_name("local_slurm.sh"))
        self.control = ["bash", script]
        self.daemons = str(directory / "slurm")

    def __enter__(self) -> "Cluster":
        subprocess.run(
            [*self.control, "start", self.daemons, str(self.nodes), "8", "2"], env=self.environment, check=True
        )
        self.environment["SLURM_CONF"] = f"{self.daemons}/slurm.conf"
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run([*self.control, "stop", self.daemons], env=self.environment, check=True)

    def command(self, *words: str, without: tuple[str, ...] = (), cwd: Path | None = None, **variables: str) -> str:
        environment = {name: value for name, value in self.environment.items() if name not in without} | variables
        return subprocess.run(
            words, env=environment, cwd=cwd or self.directory, check=True, text=True, capture_output=True
        ).stdout.strip()

    def submit(
        self, script: str, *arguments: str, options: str = "", without: tuple[str, ...] = (), **variables: str
    ) -> "Job":
        """Submit slurm/SCRIPT, or the script of that path."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        path = str(ROOT / "slurm" / script)
        line = ["sbatch", "--parsable", "--cpus-per-task=1", f"--export={exported}", *options.split(), path]
        return Job(self, self.command(*line, *arguments, without=without), arguments)


class Job:
    def __init__(self, cluster: Cluster, number: str, arguments: tuple[str, ...]) -> None:
        self.cluster, self.number = cluster, number
        self.run = cluster.directory / f"runs/{arguments[0]}/job-{number}" if arguments else Path()
        self.folder = cluster.directory
        self.starts = cluster.directory / f"runs/starts/{number}"

    def field(self, name: str) -> str:
        shown = self.cluster.command("scontrol", "show", "job", "--oneliner", self.number)
        return re.search(rf"\b{name}=(\S+)", shown)[1]  # type: ignore[index]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{self.number}.log"))

    def result(self) -> dict:
        assert self.ended() == "COMPLETED", self.log()
        return json.loads((self.run / "result.json").read_text())

    def weights(self) -> bytes:
        return (self.run / "model.safetensors").read_bytes()

    def update(self) -> int:
        """Return the newest update in metrics.jsonl."""
        with contextlib.suppress(OSError):
            return max([int(n) for n in re.findall(r'"update": (\d+)', (self.run / "metrics.jsonl").read_text())] + [0])
        return 0

    def until(self, condition: Callable[[], bool], seconds: float = 180, pause: float = 0.1) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain; the log says\n{self.log()}"
            time.sleep(pause)

    def ended(self, seconds: float = 400) -> str:
        going_on = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "PREEMPTED")
        # A pause: each look is a process, scontrol.
        self.until(lambda: self.field("JobState") not in going_on, seconds, pause=0.5)
        return self.field("JobState")

    def trains_on(self, seconds: float = 180) -> None:
        """Wait for the next logged updates."""
        before = self.update()
        self.until(lambda: self.update() >= before + 20, seconds)

    def restarted(self, starts: int) -> None:
        self.until(lambda: self.log().count(f"job {self.number}, start {starts},") > 0)

    def processes(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        """Yield the number, command line and environment of each process of this job."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_text(errors="replace").split("\0")
                pairs = (process / "environ").read_text(errors="replace").split("\0")
                environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                if environment.get("SLURM_JOB_ID") == self.number:
                    yield int(process.name), words, environment

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the training processes, by rank."""
        return {
            int(environment.get("RANK", environment["SLURM_PROCID"])): number
            for number, words, environment in self.processes()
            if re.fullmatch(r"-u -m|-m accel_train.train", " ".join(words[1:3])) and "accel_train.train" in words[2:4]
        }


@contextlib.contextmanager
def local_cluster(nodes: int = 2) -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's paths are too long for Slurm's sockets
    with Cluster(directory, nodes) as started:
        yield started
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_cluster() as started:
        yield started


LONG = ("digits", "--epochs", str(EPOCHS), "--log-every-updates", "1")
TWO_NODES = "--nodes=2 --ntasks-per-node=1"


@pytest.fixture(scope="module")
def limited(cluster: Cluster) -> Job:
    """Start the run that reaches its time limit. While it starts, no other job takes the processors."""
    job = cluster.submit("train.sbatch", *LONG, options="--time=2 --signal=B:USR1@60")
    job.until(lambda: job.update() >= 20)
    return job


@pytest.fixture(scope="module")
def uninterrupted(cluster: Cluster, limited: Job) -> dict[str, Job]:
    """Start the runs of which others, with interruptions, have the weights."""
    return {
        "alone": cluster.submit("train.sbatch", *LONG),
        "pair": cluster.submit("tasks.sbatch", *LONG, options=TWO_NODES),
    }


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, limited: Job) -> dict[str, Job]:
    """Start the same short run with three scripts."""
    short = ("digits", "--epochs", "1", "--log-every-updates", "1")
    return {
        "short": cluster.submit("train.sbatch", *short),
        "four": cluster.submit("train.sbatch", *short, options="--nodes=2 --gpus-per-node=2"),
        "tasks": cluster.submit("tasks.sbatch", *short, options="--nodes=2 --ntasks-per-node=2"),
    }


def losses(job: Job) -> list[float]:
    return [line["loss"] for line in helpers.lines_of(job.run, "train")]


WHAT_IT_IS = """\
import os, sys
from accel_train.launch.environment import prepare_environment
launch = prepare_environment()
print("found", sys.argv[1], launch.launcher, launch.rank, launch.world_size, os.environ.get("MASTER_PORT"))
"""


def in_terminal(cluster: Cluster, command: str, line: str) -> str:
    """Type a line, and exit, in the shell that a command opens in a terminal; return what is shown there."""
    words = ["script", "--quiet", "--return", "--command", command, "/dev/null"]
    environment = cluster.environment | {"SHELL": "/bin/bash"}  # as a login sets it: salloc starts it
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=cluster.directory, text=True
    ) as shell:
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdin.write(f"{line}; exit\n")
        shell.stdin.flush()  # its end would end the shell
        return shell.stdout.read()


@pytest.mark.ci
def test_what_interactive_shells_start(cluster: Cluster) -> None:
    """A shell of a step, tasks of srun and batch scripts inherit one another's variables, and are what they are.

    It stands first in this file: its jobs must start at once, so no other test's job may have the nodes.
    """
    program, batch = cluster.directory / "what.py", cluster.directory / "batch.sh"
    program.write_text(WHAT_IT_IS)
    say = f"{sys.executable} {program}"
    batch.write_text(f"#!/bin/bash\n{say} script\nsrun -n2 {say} in-script\ntouch {batch}.$1\n")
    submit = f"sbatch -n2 -o {batch}.log {batch}"  # and not --wait, which looks every ten seconds
    line = f"{say} shell; srun --overlap -n2 {say} nested; srun --overlap -n2 {say} next; {submit}"

    def log(number: object) -> str:
        for _ in range(1000):
            if Path(f"{batch}.{number}").exists():
                return Path(f"{batch}.log").read_text()
            time.sleep(0.1)
        raise AssertionError(shown + cluster.command("squeue"))

    for number, command in enumerate(("salloc -n2", "srun -n2 --pty bash")):
        shown = in_terminal(cluster, command, f"{line} {number}")
        found = sorted(re.findall(r"^found (\S+) (\S+) (\d) (\d)", shown + log(number), re.MULTILINE))
        ranks = [(name, "srun", rank, "2") for name in ("in-script", "nested", "next") for rank in "01"]
        assert found == [*ranks, ("script", "none", "0", "1"), ("shell", "none", "0", "1")], shown
        ports = re.findall(r"^found (?:nested|next) srun . 2 (\d+)", shown, re.MULTILINE)
        assert len(set(ports)) == 2, shown
    cluster.command("srun", "-n2", "bash", "-c", f"if ((SLURM_PROCID == 1)); then {submit} step; fi")
    assert "found script none 0 1" in log("step") and "found in-script srun 1 2" in log("step")


@pytest.mark.ci
def test_the_time_limit_interrupts_and_the_job_goes_on(limited: Job) -> None:
    job = limited
    rank = job.ranks()[0]
    os.kill(rank, signal.SIGSTOP)  # so that it is not ready before the warning
    job.until(lambda: [*job.starts.glob("*/warned")] != [])
    os.kill(rank, signal.SIGCONT)
    job.until(lambda: (job.run / "slurm" / "requeues").exists())
    job.restarted(1)


@pytest.mark.slow
def test_each_script_makes_the_same_run(jobs: dict[str, Job]) -> None:
    alone, four, tasks = (jobs[name].result() for name in ("short", "four", "tasks"))
    assert [found["world_size"] for found in (alone, four, tasks)] == [1, 4, 4]
    assert losses(jobs["short"]) == pytest.approx(losses(jobs["four"]), rel=1e-4)
    assert losses(jobs["four"]) == losses(jobs["tasks"])
    assert jobs["four"].weights() == jobs["tasks"].weights()
    assert four["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.01)
    for job in jobs.values():
        assert "test accuracy" in job.log() and not job.starts.exists()
        assert (job.run / "slurm" / "job").read_text().strip() == job.number


@pytest.mark.slow
def test_a_run_survives_everything(cluster: Cluster, uninterrupted: dict[str, Job]) -> None:
    """Signals, requeues, preemption and a killed rank: it ends with an uninterrupted run's weights."""
    job = cluster.submit("train.sbatch", *LONG, options="--nodes=2", PROCESSES_PER_NODE="1")
    # the warning before the time limit, as --signal=USR1@… sends it to the processes; and a user who asks for a stop
    for start, warning in enumerate(("USR1", "TERM"), 1):
        job.trains_on()
        cluster.command("scancel", f"--signal={warning}", job.number)
        job.restarted(start)
    # an administrator
    job.trains_on()
    cluster.command("scontrol", "requeue", job.number)
    job.restarted(3)
    # a job of a higher partition that wants both nodes
    job.trains_on()
    urgent = cluster.command("sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "--wrap=true", "-o/dev/null")
    job.restarted(4)
    assert "JobState=COMPLETED" in cluster.command("scontrol", "show", "job", urgent)
    # the operating system kills one process: the job fails, soon and clearly
    job.trains_on()
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.ended(60) == "FAILED"
    assert "failed with exit code" in job.log() and not job.ranks()
    cluster.command("scontrol", "requeue", job.number)
    job.restarted(5)
    assert job.result()["world_size"] == uninterrupted["pair"].result()["world_size"] == 2
    expected, found = (
        {line["update"]: line["loss"] for line in helpers.lines_of(one.run, "train")}
        for one in (uninterrupted["pair"], job)
    )
    assert [update for update in expected if expected[update] != found.get(update, expected[update])] == []
    assert job.weights() == uninterrupted["pair"].weights()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_node_is_noticed_and_the_job_goes_on(
    how: signal.Signals, cluster: Cluster, uninterrupted: dict[str, Job]
) -> None:
    """It dies, or it freezes."""
    job = cluster.submit("tasks.sbatch", *LONG, options=TWO_NODES)
    job.trains_on()
    lost, daemon = job.ranks()[1], int(Path(f"{cluster.daemons}/slurmd-127.0.0.12.pid").read_text())
    os.kill(lost, signal.SIGSTOP)
    os.kill(daemon, how)
    job.until(lambda: job.field("JobState") in ("PENDING", "REQUEUED"), 300)  # after SlurmdTimeout
    os.kill(lost, signal.SIGKILL)
    job.until(lambda: not job.ranks())
    if how == signal.SIGSTOP:  # the node comes back
        os.kill(daemon, signal.SIGCONT)
    else:
        cluster.command("slurmd", "-N", "127.0.0.12")
    job.restarted(1)
    assert job.result()["world_size"] == 2 and job.weights() == uninterrupted["pair"].weights()


@pytest.mark.slow
def test_the_interrupted_single_process_ends_as_the_uninterrupted(limited: Job, uninterrupted: dict[str, Job]) -> None:
    assert limited.result()["world_size"] == 1
    assert limited.weights() == uninterrupted["alone"].weights()


@pytest.mark.slow
def test_a_warning_while_the_launcher_imports_is_kept(cluster: Cluster) -> None:
    job = cluster.submit("train.sbatch", *LONG, options="--nodes=2", PROCESSES_PER_NODE="1")
    job.until(lambda: len([*job.starts.glob("*/nodes/*")]) == 2)  # the launchers have begun
    cluster.command("scancel", "--signal=USR1", "--batch", job.number)
    job.until(lambda: (job.run / "slurm" / "requeues").exists(), 400)
    assert not job.ranks() and "Stopped by the warning before the job's end after update" in job.log()
    assert int((job.run / "slurm" / "requeues").read_text()) < 5
    cluster.command("scancel", job.number)


@pytest.mark.slow
def test_a_warning_in_the_first_second_while_modules_load(cluster: Cluster, uninterrupted: dict[str, Job]) -> None:
    """ENVIRONMENT takes 50 s, and the time limit is four minutes at first: two are too few beside other tests."""
    script = cluster.directory / "slow modules.sbatch"
    text = (ROOT / "slurm" / "train.sbatch").read_text()
    marker = "# End of ENVIRONMENT"
    assert text.count(marker) == 1
    slow = "if ((${SLURM_RESTART_COUNT:-0} == 0)); then sleep 50; fi"
    script.write_text(text.replace(marker, f"{slow}\n{marker}"))
    options = "--nodes=2 --time=4 --signal=B:USR1@239"
    job = cluster.submit(str(script), *LONG, options=options, PROCESSES_PER_NODE="1")
    job.until(lambda: job.field("JobState") == "RUNNING")
    job.until(lambda: job.field("JobState") == "PENDING", 300)  # it has saved, and has asked for a requeue
    assert int((job.run / "slurm" / "requeues").read_text()) < 5
    assert "Stopped by the warning before the job's end after update" in job.log()
    cluster.command("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    assert job.result()["world_size"] == 2 and job.weights() == uninterrupted["pair"].weights()


@pytest.mark.slow
def test_spaces_and_quotes_and_the_line_that_is_pasted(cluster: Cluster, uninterrupted: dict[str, Job]) -> None:
    """The script's folder, its words and the run's folder have them; a person pastes the line that a failure prints."""
    folder = cluster.directory / 'it\'s a "folder" of $HOME'
    shutil.copytree(ROOT / "slurm", folder / "slurm")
    run = cluster.directory / 'a "run" that isn\'t'
    words = [*LONG[1:], "--output-dir", str(run)]
    (folder / "my recipe.yaml").write_text("base: digits\n")
    line = ["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", str(folder / "slurm" / "train.sbatch")]
    number = cluster.command(*line, "my recipe.yaml", *words, cwd=folder, PROCESSES_PER_NODE="1")
    job = Job(cluster, number, ())
    job.run, job.folder = run, folder
    job.trains_on()
    cluster.command("scancel", "--signal=USR1", "--batch", number)
    job.restarted(1)
    job.trains_on()
    os.kill(job.ranks()[1], signal.SIGKILL)
    assert job.ended(60) == "FAILED"
    (pasted,) = re.findall("To continue the run: (.*)", job.log())
    assert "PROCESSES_PER_NODE=1" in pasted and "MASTER_" not in pasted
    again = Job(cluster, cluster.command("bash", "-c", pasted).split()[-1], ())
    again.run, again.folder = run, folder
    assert again.result()["world_size"] == 2 and again.weights() == uninterrupted["pair"].weights()


@pytest.mark.slow
def test_the_launcher_by_hand_is_as_the_docs_say(cluster: Cluster, jobs: dict[str, Job]) -> None:
    """docs/clusters.md, "By hand", in an ordinary allocation of several tasks a node."""
    text = (ROOT / "docs" / "clusters.md").read_text().split("### By hand")[1].split("```")[1].removeprefix("bash\n")
    config = "accelerate_configs/multi_node.yaml"
    for old, new in ((config, f"{ROOT}/accelerate_configs/multi_cpu.yaml"), ("* 4)", "* 2)"), ("RECIPE", "digits")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    words = "--epochs 1 --log-every-updates 1 --output-dir runs/by-hand"
    script = cluster.directory / "by-hand.sh"
    script.write_text(f"#!/bin/bash\n{text.rstrip()} {words}\n")
    options = "--nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --output=%x-%j.log"
    job = Job(cluster, cluster.command("sbatch", "--parsable", *options.split(), str(script)), ())
    job.run = cluster.directory / "runs" / "by-hand"
    assert job.result()["world_size"] == 4
    assert losses(job) == losses(jobs["tasks"])


@pytest.mark.slow
def test_a_start_that_fails_names_the_line_to_go_on_with(cluster: Cluster) -> None:
    begun = cluster.directory / "begun"
    begun.mkdir()
    (begun / "config.yaml").touch()
    folder = ("--data.name", "folder", "--output-dir", str(begun))
    wrong = cluster.submit("train.sbatch", "digits", "--data.root", "/nowhere", *folder)
    address = cluster.submit(
        "tasks.sbatch", "digits", "--rendezvous-timeout-seconds", "3", options=TWO_NODES, MASTER_ADDR="no-such-host"
    )
    for job in (wrong, address):
        assert (job.ended(), job.field("ExitCode")) == ("FAILED", "2:0")
    assert "found nobody at no-such-host:" in address.log()
    again = "sbatch --nodes=1 --job-name=accel-train --partition=main --time=04:00:00 "
    again += f"--cpus-per-task=1 {ROOT}/slurm/train.sbatch {begun}/config.yaml --output-dir {begun}"
    # what a person pastes has neither a default nor what the script has computed
    variables = f"cd {cluster.directory} && ACCELERATE_CONFIG={cluster.environment['ACCELERATE_CONFIG']} DOCTOR=off "
    assert variables + again in wrong.log()
    assert "slurm_script" not in wrong.log() and "scontrol" not in wrong.log()
    assert "error: " in wrong.log() and "failed with exit code 2" in wrong.log()


@pytest.mark.slow
def test_a_folder_without_a_checkout(cluster: Cluster, tmp_path: Path) -> None:
    """`accel-train init` wrote the scripts. Nothing but its .venv, with the wheel, says where the program is."""
    installed = wheel_environment.install(tmp_path / "wheel")
    folder = tmp_path / "project"
    subprocess.run([installed / "bin" / "accel-train", "init", folder], check=True, env={"PATH": "/usr/bin:/bin"})
    options = "--parsable --export=NONE --cpus-per-task=1 --nodes=2 --wait"
    line = ["sbatch", *options.split(), "slurm/train.sbatch", "recipe.yaml", "--epochs", "1"]
    plain = {"PATH": "/usr/bin:/bin:/usr/sbin", "SLURM_CONF": cluster.environment["SLURM_CONF"]}
    done = subprocess.run(line, cwd=folder, env=plain, capture_output=True, text=True, timeout=240)
    log = "".join(path.read_text() for path in folder.glob("*.log"))
    assert done.returncode == 0, done.stderr + log
    (run,) = (folder / "runs" / "recipe").iterdir()
    assert json.loads((run / "result.json").read_text())["world_size"] == 2, log
    assert json.loads((run / "environment.json").read_text())["command"][0].startswith(str(installed))
