"""`accel-train after-job`, with what the batch systems say of a job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pbs_record import qstat_record

from accel_train.cli import main
from accel_train.launch.process import tell_job_script
from accel_train.records.directory import begin_start

# The line is that of Slurm 22.05.
SCONTROL = (
    "JobId=7 JobName=my job UserId=a(1) Account=acct QOS=long Requeue={requeue} TimeLimit=00:30:00 "
    "Partition=p ReqNodeList=(null) ExcNodeList=n[3-4] NumNodes=2 OverSubscribe=NO Features=ib Reservation=class "
    "Licenses=x:1 Command=/a folder/my.sbatch my recipe.yaml --epochs 3 WorkDir=/x TresPerNode=gres:gpu:a100:2"
)
QSTAT = qstat_record("9.server", "01:00:00", "HF_TOKEN=secret,WORDS=a\\,TRICK=b,LEAD_SECONDS=60,")
WORDS = ["--", "my recipe.yaml", "--epochs", "3"]


class Start:
    """One start of a job, as its script sees it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.run, self.capsys = folder, folder / "runs" / "my recipe" / "job-7", capsys
        self.place = folder / "runs" / "starts" / "7" / "now"
        self.program("scontrol", """[[ $2 == job ]] && echo "$SHOWN" || printf 'n1\\nn2\\n'""")
        self.program("qstat", f"cat {folder}/qstat")
        (folder / "qstat").write_text(QSTAT)

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def begin(self, *nodes: str, owns: bool = True) -> None:
        (self.place / "nodes").mkdir(parents=True, exist_ok=True)
        for path in self.place.iterdir():
            if path.is_file():
                path.unlink()
        for node in nodes:
            (self.place / "nodes" / node).touch()
        if owns:
            self.run.mkdir(parents=True, exist_ok=True)
            begin_start(self.run)

    def after(self, code: int, words: list[str] = WORDS) -> tuple[str, str]:
        """Return the line for the script, and what a person sees."""
        self.capsys.readouterr()
        assert main(["after-job", str(code), *words]) == 0
        out, err = self.capsys.readouterr()
        assert out.count("\n") == 1
        return out.strip(), err


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    made = Start(tmp_path, capsys)
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("SLURM", "PBS", "ACCELERATE", "MAX_", "DOCTOR", "RANK")):
            monkeypatch.delenv(name)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "ACCEL_TRAIN_START": str(made.place), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SHOWN": SCONTROL.format(requeue=1),
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return made


def test_a_stop_without_progress_is_requeued_three_times(start: Start) -> None:
    decisions = []
    for update in ("10", "20", "20", "20", "20", "30"):
        start.begin("n1", "n2")
        tell_job_script("REQUEUE", update)
        decision, said = start.after(0)
        decisions.append((decision, "without progress" in said))
    assert decisions == [("requeue", False)] * 4 + [("end 1", True)] + [("requeue", False)]
    assert (start.run / "slurm" / "requeues").read_text().split() == ["10", "20", "20", "20", "20", "30"]


def test_what_ended_the_training_decides(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's own code counts, and not srun's; a finished job leaves no folder behind."""
    start.begin("n1", "n2")
    tell_job_script("exit-code", 3)
    decision, said = start.after(1)
    assert decision == "end 3" and "failed with exit code 3" in said and "no task could write" not in said
    (start.run / "status.json").write_text('{"state": "failed", "reason": "A process was killed: rank 1 on n2"}')
    assert "failed with exit code 3: A process was killed: rank 1 on n2. To continue the run: cd " in start.after(1)[1]
    start.begin("n1", "n2")
    assert start.after(137)[0] == "end 137"  # killed: it could not write
    (start.place / "nodes" / "n2").unlink()
    assert "on n2: are these nodes up" in start.after(1)[1]
    start.begin("n1", "n2")
    tell_job_script("REQUEUE", 10)
    monkeypatch.setenv("SHOWN", SCONTROL.format(requeue=0))
    decision, said = start.after(0)
    assert decision == "end 1" and "may not be requeued. To continue: cd " in said
    (start.place / "ended").touch()
    decision, said = start.after(0)
    assert decision == "end 143" and "after scancel or qdel it does not: then cd " in said
    start.begin("n1", "n2")
    assert start.after(0) == ("end 0", "")
    assert not start.place.parent.exists()


def test_only_the_owner_of_a_run_asks(start: Start) -> None:
    """Another job that is refused neither obeys a file of the owner's nor labels its run."""
    start.begin("n1", "n2")
    (start.run / "REQUEUE").write_text("10\n")
    os.environ["SLURM_JOB_ID"] = "8"  # restored by the fixture
    start.begin("n1", "n2", owns=False)
    tell_job_script("exit-code", 2)
    decision, said = start.after(1, [*WORDS, "--output-dir", str(start.run)])
    assert decision == "end 2" and "no run has begun that could be continued" in said
    assert (start.run / "slurm" / "job").read_text() == "7\n" and (start.run / "REQUEUE").exists()


def test_a_refused_command_is_not_the_one_to_continue_with(start: Start) -> None:
    start.begin("n1", "n2", owns=False)
    tell_job_script("exit-code", 2)
    wrong = ["--", "my recipe.yaml", "--epochs", "nonsense"]
    said = start.after(2, wrong)[1]
    assert "Correct what it says and submit the job again" in said and "sbatch" not in said and "nonsense" not in said
    start.run.mkdir(parents=True)
    (start.run / "config.yaml").touch()
    said = start.after(2, wrong)[1]
    words = shlex.split(said)
    assert words[-3:] == [f"{start.run}/config.yaml", "--output-dir", str(start.run)] and "nonsense" not in said


def test_the_line_of_slurm_can_be_pasted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has each option of the job and what the user has set, and no other variable, which may be secret."""
    given = {
        "MEM_PER_NODE": "2G", "MEM_PER_CPU": "1G", "MEM_PER_GPU": "8G", "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "3",
        "GPUS_PER_TASK": "1", "GPUS_PER_SOCKET": "4", "GPUS": "a100:4",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name, value in {"DOCTOR": "print", "MAX_REQUEUES": "5", "MASTER_ADDR": "a b", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    start.begin("n1", "n2")
    said = start.after(1)[1]
    assert "secret" not in said
    words = shlex.split(said.partition("To continue the run: ")[2])
    assert words == [
        "cd", str(start.folder), "&&", "MASTER_ADDR=a b", "MAX_REQUEUES=5", "sbatch", "--nodes=2", "--job-name=my job",
        "--partition=p", "--time=00:30:00", "--account=acct", "--qos=long", "--constraint=ib", "--reservation=class",
        "--licenses=x:1", "--exclude=n[3-4]", "--mem-per-cpu=1G", "--mem-per-gpu=8G", "--ntasks-per-node=2",
        "--cpus-per-task=3", "--gpus-per-task=1", "--gpus-per-socket=4", "--mem=2G", "--gres=gpu:a100:2",
        "--gpus=a100:4", "--exclusive", "/a folder/my.sbatch", "my recipe.yaml", "--epochs", "3", "--output-dir",
        str(start.run),
    ]  # fmt: skip
    # without an answer of Slurm, as in a container
    start.program("scontrol", "exit 1")
    words = shlex.split(start.after(1)[1].partition("To continue the run: ")[2])
    assert "slurm/train.sbatch" in words and "--nodes=2" in words


@pytest.fixture
def pbs(start: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    (start.folder / "nodes").write_text("n1\nn1\nn2\n")
    variables = {"PBS_JOBID": "9.server", "PBS_NODEFILE": str(start.folder / "nodes"), "PBS_O_QUEUE": "entry",
                 "HF_TOKEN": "secret", "LEAD_SECONDS": "60"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return start


OPTIONS = [
    "-l", "filesystems=home:scratch", "-l", "place=scatter", "-l", "select=2:ncpus=2:mpiprocs=2", "-l",
    "walltime=01:00:00", "-q", "entry", "-A", "acct", "-N", "name", "-m", "a", "-W", "group_list=lab",
]  # fmt: skip
"""What PBS was told of the job: not what the script asks for, nor the sums over chunks."""


def test_a_job_of_pbs_submits_itself_again(pbs: Start) -> None:
    """With the options of the first, and the names of the variables that the user had given: their values are the
    shell's, and are not shown."""
    pbs.begin("n1", "n2")
    assert (pbs.run / "slurm" / "job").read_text() == "9.server\n"
    tell_job_script("REQUEUE", 10)
    decision, said = pbs.after(0)
    assert shlex.split(decision) == ["resubmit", "HF_TOKEN WORDS LEAD_SECONDS", *OPTIONS]
    assert "secret" not in said and "If that fails: cd " in said and pbs.place.exists()
    pbs.begin("n1", "n2")
    said = pbs.after(1)[1]
    assert "secret" not in said and "no task could write" not in said
    train = f"'my recipe.yaml' --epochs 3 --output-dir '{pbs.run}'"
    words = shlex.split(said.partition("To continue the run: ")[2])
    assert words[3:] == ["LEAD_SECONDS=60", f"TRAIN={train}", "qsub", "-V", *OPTIONS, "pbs/train.pbs"]
    pbs.run = pbs.folder / "runs" / "recipe" / "job-7"
    pbs.begin("n1", "n2")
    words = shlex.split(pbs.after(1, ["--", "recipe.yaml"])[1].partition("To continue the run: ")[2])
    assert words[4] == f"TRAIN=recipe.yaml --output-dir {pbs.run}" and words[6:8] == ["-v", "LEAD_SECONDS,TRAIN"]


def test_an_element_of_a_list_is_its_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = start.folder / "sub mit"
    (folder / "jobs").mkdir(parents=True)
    lines = [json.dumps({"name": f"seed={seed}"}) for seed in range(3)]
    (folder / "jobs" / "x.jsonl").write_text("\n".join(lines) + "\n")
    start.place = start.folder / "runs" / "starts" / "5_2" / "now"
    monkeypatch.setenv("ACCEL_TRAIN_START", str(start.place))
    start.begin("n1", "n2", owns=False)
    words = shlex.split(start.after(1, ["--", str(folder / "jobs" / "x.jsonl")])[1])
    assert words[-3:] == [f"{folder}/seed=2/recipe.yaml", "--output-dir", f"{folder}/seed=2"]


def test_nothing_is_written_where_a_link_of_the_run_leads(start: Start) -> None:
    """The run may be somebody else's."""
    mine = start.folder / "mine"
    mine.mkdir()
    (mine / "job").write_text("mine")
    (mine / "requeues").write_text("mine")
    start.run.mkdir(parents=True)
    (start.run / "slurm").symlink_to(mine)
    start.begin("n1", "n2")
    (start.run / "slurm" / "requeues").symlink_to(mine / "requeues")
    tell_job_script("REQUEUE", 10)
    assert start.after(0)[0] == "requeue"
    assert [path.read_text() for path in (mine / "job", mine / "requeues")] == ["mine"] * 2


def test_without_a_job_script_it_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCEL_TRAIN_START")
    assert main(["after-job", "1"]) == 2
    assert "ACCEL_TRAIN_START is not set" in start.capsys.readouterr().err


def test_it_is_there_at_once() -> None:
    """A job that ends has 30 s: no torch, and nothing else that takes long to import."""
    code = "import sys, accel_train.cli.jobs; print({'torch', 'accelerate', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
