"""pbs/train.pbs with the variables and files that PBS sets; small scripts replace the commands of PBS.

They behave as a real OpenPBS with two nodes did.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers
import pytest
import wheel_environment
import worlds
from test_scripts import PROGRAM, read_variables

ROOT = helpers.ROOT
COMMANDS = {
    # On the n-th line of the node file, in another environment and a session of its own; TMPDIR is the job's. It hands
    # on SIGTERM and ends with 1 then, else with 0, whatever its task returned.
    "pbsdsh": """
        shift; index=$1; shift 2; echo "pbsdsh $index" >>"$LOG"
        number=$(printf %08X $((0x40000000 * (index > 1) + 10 + index)))
        mkdir -p "$SPOOL/tmp"
        setsid env -i HOME="$HOME" PATH=/bin:/usr/bin LOG="$LOG" PBS_JOBID="$PBS_JOBID" PBS_NODENUM=$((index / 2)) \\
            PBS_TASKNUM="$number" PBS_ENVIRONMENT=PBS_BATCH TMPDIR="$SPOOL/tmp" "$@" &
        trap 'echo "pbsdsh: killing task 0x$number signal 15"; kill -TERM -- -$!; exit 1' TERM
        code=0; wait $! || code=$?
        ((code == 0)) || echo "pbsdsh: task 0x00000000 exit status $code"
        exit 0""",
    "qstat": """
        cat <<END
Job Id: $2
    Job_Name = name
    queue = small
    Account_Name = acct
    group_list = lab
    project = _pbs_project_default
    Mail_Points = a
    Resource_List.filesystems = home:scratch
    Resource_List.mpiprocs = 4
    Resource_List.ncpus = 4
    Resource_List.nodect = 2
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=2:mpiprocs=2
    Resource_List.walltime = ${WALLTIME:-01:00:00}
    schedselect = 2:ncpus=2:mpiprocs=2
    Variable_List = PBS_O_HOME=/root,PBS_O_PATH=/opt/pbs/bin:/usr/sb
	in:/bin,${GIVEN}PBS_O_QUEUE=entry
END""",
    # this site has no GPUs to count
    "qsub": """
        echo "qsub $* CONTINUE=$CONTINUE" >>"$LOG"
        if [[ "$*" != *"select="* || "$*" == *ngpus* ]]; then echo "qsub: Unknown resource: ngpus" >&2; exit 1; fi
        echo 124.server""",
}


ALWAYS_SET = {"PBS_JOBID", "PBS_NODEFILE", "PBS_O_WORKDIR"}


def train(
    directory: Path, *, walltime: str = "01:00:00", without: str = "", **variables: str | None
) -> "subprocess.CompletedProcess[str]":
    """Run the script as PBS would. A variable that is None is not set."""
    commands = directory / "bin"
    commands.mkdir(exist_ok=True)
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    if without:
        (commands / without).unlink()
    (directory / "nodes").write_text("127.0.0.1\n127.0.0.1\nlocalhost\nlocalhost\n")
    # PBS runs a copy of the script
    script = directory / "123.server.SC"
    script.write_bytes((ROOT / "pbs" / "train.pbs").read_bytes())
    environment = worlds.environment(
        PBS_JOBID="123.server", PBS_NODEFILE=str(directory / "nodes"), PBS_O_WORKDIR=str(directory),
        PBS_O_QUEUE="entry", LOG=str(directory / "log"), WALLTIME=walltime,
        SPOOL=str(directory),
    )  # fmt: skip
    ours = {"ACCEL_TRAIN_SITE": str(directory / "site"), "ACCEL_TRAIN_ROOT": str(ROOT), "DOCTOR": "off"}
    # qsub -v: what this submission was given and nothing more; a continuation is given nothing but CONTINUE
    merged = variables if "CONTINUE" in variables else ours | variables
    given = {name: value for name, value in merged.items() if value is not None}
    environment = {name: value for name, value in (environment | given).items() if name not in merged or name in given}
    words = [f"{name}={value}".replace(",", "\\,") for name, value in given.items()]
    environment["GIVEN"] = "".join(f"{word},\n\t" for word in words)
    site = directory / "site"
    if not site.exists():
        site.write_text(SITE)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        ["bash", str(script)], env=environment | {"PATH": path}, cwd=directory,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip


SITE = "export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1\n"
CPU = {"PROCESSES_PER_NODE": "1", "ACCELERATE_CONFIG": str(ROOT / "accelerate_configs" / "multi_cpu.yaml")}


@pytest.mark.slow
def test_one_launcher_a_node_and_again_after_the_time_limit(tmp_path: Path) -> None:
    # the time limit is so near that STOP is laid while the program starts: the first update obeys it
    words = "digits --epochs 2 --output-dir 'my run'"
    first = train(tmp_path, TRAIN=words, walltime="00:00:12", LEAD_SECONDS="11", **CPU)
    run = tmp_path / "my run"
    log = (tmp_path / "log").read_text().splitlines()
    assert first.returncode == 0, first.stdout + first.stderr
    assert sorted(log[:2]) == ["pbsdsh 0", "pbsdsh 2"]
    # what PBS was told of the first job, it is told of the next: not what the script asks for, nor the sums over chunks
    options = (
        "-l filesystems=home:scratch -l place=scatter -l select=2:ncpus=2:mpiprocs=2 -l walltime=00:00:12 "
        "-q entry -A acct -N name -m a -W group_list=lab"
    )
    assert log[2:] == [f"qsub -v CONTINUE {options} {ROOT}/pbs/train.pbs CONTINUE={run}"]
    assert not (run / "result.json").exists()
    # what qsub starts: nothing but CONTINUE and what PBS sets; another file may still be named by hand
    second = train(tmp_path, CONTINUE=str(run), LEAD_SECONDS="12", DOCTOR="strict")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "accel-train doctor" not in second.stdout  # it goes on from a checkpoint
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["updates"]) == (2, 60)
    assert "2 machines met within" in second.stdout
    program = json.loads((run / "environment.json").read_text())["command"][0]
    assert program == str(ROOT / "accel_train" / "train.py")  # the nodes have the job's PYTHONPATH, if it has one
    assert "continuing after update" in second.stdout
    # each rank's own log, of both starts
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    assert "Stopped by the file STOP" in logs["rank-0.log"] and "continuing after update" in logs["rank-0.log"]
    assert logs["rank-1.log"].count("rank 1 on ") == 2
    # once more: nothing is left to do
    assert "my run holds a finished run" in train(tmp_path, TRAIN=words, **CPU).stdout


@pytest.mark.slow
def test_a_chain_of_jobs(tmp_path: Path) -> None:
    """Each job saves and submits the next, which has the variables of the first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "accelerate").write_text(
        '#!/bin/bash\necho "$ONLY_MINE $*" >>"$RUN/trained"; expr $(wc -l <"$RUN/trained") / 2 >"$RUN/REQUEUE"\n'
    )
    (tmp_path / "bin" / "accelerate").chmod(0o755)
    run = tmp_path / "my run"
    given = {"LEAD_SECONDS": "11", "ACCEL_ONLY_MINE": "1,2", "DOCTOR": "", **CPU}
    (tmp_path / "site").write_text("site_environment() { export ONLY_MINE=$ACCEL_ONLY_MINE; }\n")
    jobs = [train(tmp_path, TRAIN="digits --epochs 2 --output-dir 'my run'", walltime="00:00:15", **given)]
    kept = (run / "slurm" / "variables.sh").read_text()
    jobs += [train(tmp_path, CONTINUE=str(run), walltime="00:00:15") for _ in range(3)]
    for job in jobs:
        assert job.returncode == 0, job.stdout + job.stderr
    assert (run / "slurm" / "variables.sh").read_text() == kept and "TRAIN=" in kept and "LEAD_SECONDS=11" in kept
    trained = (run / "trained").read_text().splitlines()
    assert len(trained) == 8 and all(line.startswith("1,2 ") and "--epochs 2" in line for line in trained)
    # after a failure in a continuation, the command that it prints has them, too
    (tmp_path / "bin" / "accelerate").write_text("#!/bin/bash\nexit 3\n")
    failed = train(tmp_path, CONTINUE=str(run), walltime="00:00:15")
    assert failed.returncode == 3 and "qsub -v CONTINUE" in failed.stderr
    assert (run / "slurm" / "variables.sh").read_text() == kept


@pytest.mark.slow
def test_no_missing_variable_ends_a_job(tmp_path: Path) -> None:
    """None, and all but one of the variables that the script and its nodes read."""
    read = read_variables("pbs/train.pbs", "slurm/common.sh", "slurm/rank.sh")
    names = {name for name in read if not name.startswith("SLURM")} - {"TRAIN", "CONTINUE", *ALWAYS_SET}
    config = str(ROOT / "accelerate_configs" / "cpu.yaml")
    everything = dict.fromkeys(names, "1") | {"ACCELERATE_CONFIG": config, "DOCTOR": "print", "TMPDIR": str(tmp_path)}
    assert {"LEAD_SECONDS", "PBS_O_QUEUE", "DOCTOR", "MASTER_ADDR"} <= names

    def run(left_out: set[str]) -> "subprocess.CompletedProcess[str]":
        folder = tmp_path / f"without {len(left_out)} {min(left_out)}"
        for part in ("slurm", "pbs", "accelerate_configs"):  # and no .venv, which would bring the real programs
            shutil.copytree(ROOT / part, folder / part)
        (folder / "bin").mkdir()
        for name in ("accelerate", "python"):
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{PROGRAM}\n")
            (folder / "bin" / name).chmod(0o755)
        here = everything | {"ACCEL_TRAIN_ROOT": str(folder)}
        return train(
            folder, TRAIN="digits", **{name: None if name in left_out else value for name, value in here.items()}
        )

    choices = [names, *({name} for name in sorted(names))]
    with ThreadPoolExecutor(8) as pool:  # they mostly sleep
        for left_out, done in zip(choices, pool.map(run, choices), strict=True):
            assert "unbound" not in done.stderr and "syntax error" not in done.stderr, (left_out, done.stderr)
            assert done.returncode == 3 and "training starts" in done.stdout, (left_out, done.stdout, done.stderr)
            assert "the training starts without its answer" in done.stderr, (left_out, done.stderr)
            assert "qsub -v CONTINUE" in done.stderr, (left_out, done.stderr)


@pytest.mark.slow
def test_a_failed_run_fails_though_pbsdsh_does_not_say_so(tmp_path: Path) -> None:
    (tmp_path / "runs/digits/job-123.server").mkdir(parents=True)
    (tmp_path / "runs/digits/job-123.server/REQUEUE").touch()  # of a start long ago
    os.utime(tmp_path / "runs/digits/job-123.server/REQUEUE", (1, 1))
    wrong = train(tmp_path, TRAIN="digits --epochs nonsense", **CPU)
    assert wrong.returncode == 2, wrong.stdout + wrong.stderr
    assert "failed with exit code 2" in wrong.stderr and "Correct what it says and submit the job" in wrong.stderr
    assert "pbsdsh: task 0x00000000 exit status" in wrong.stdout
    # of a run that had begun, the settings that it had then
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text("base: digits\nepochs: 1\n")
    later = train(tmp_path, TRAIN="digits --epochs nonsense --output-dir 'my run'", **CPU)
    assert later.returncode == 2 and "qsub -v CONTINUE -l filesystems=" in later.stderr
    assert "nonsense" not in (run / "slurm" / "variables.sh").read_text()
    done = train(tmp_path, CONTINUE=str(run))
    assert done.returncode == 0 and json.loads((run / "result.json").read_text())["epochs"] == 1, done.stderr


@pytest.mark.ci
def test_a_node_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "site").write_text(
        SITE + 'if [[ ${node_name:-} == localhost ]]; then sleep 3; echo "no module here" >&2; exit 5; fi\n'
    )
    began = time.monotonic()
    failed = train(tmp_path, TRAIN="digits --epochs 1", **CPU)  # the other node would wait for it for 10 minutes
    assert failed.returncode == 5, failed.stdout + failed.stderr
    assert time.monotonic() - began < 60
    assert "ended the shell" in failed.stderr and "no task could write to" in failed.stderr
    assert "killing task" in failed.stdout


@pytest.mark.slow
def test_a_node_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    """The hosts meet before their launchers, which would wait for it for ten minutes without a word."""
    (tmp_path / "site").write_text(SITE + "if [[ ${node_name:-} == localhost ]]; then exec sleep 300; fi\n")
    began = time.monotonic()
    missing = train(tmp_path, TRAIN="digits --epochs 1 --rendezvous-timeout-seconds 3", **CPU)
    assert missing.returncode == 2, missing.stdout + missing.stderr
    assert time.monotonic() - began < 60
    lines = [line for line in missing.stderr.splitlines() if line.startswith("accel-train: error: ")]
    assert len(lines) == 1, missing.stdout + missing.stderr
    assert "1 of 2 machines met within 3 s: 0 (" in lines[0] and "Missing: machine rank 1" in lines[0]
    assert "no task could write to" in missing.stderr and "on localhost: are these nodes up" in missing.stderr


@pytest.mark.slow
def test_names_that_a_sites_file_uses_itself(tmp_path: Path) -> None:
    """With these two as its own variables each node trained alone."""
    (tmp_path / "site").write_text(SITE + "node=0 NODES=1\n")
    done = train(tmp_path, TRAIN="digits --epochs 1 --rendezvous-timeout-seconds 5", **CPU)
    assert done.returncode == 0 and "2 machines met within" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (
            "a walltime of 60 s is too short: STOP is created 120 s before",
            {"TRAIN": "digits", "walltime": "00:01:00", **CPU},
        ),
        (
            "a walltime of 60 s is too short: STOP is created 90 s before",
            {"TRAIN": "digits", "walltime": "00:01:00", "LEAD_SECONDS": "090", **CPU},
        ),
        ("LEAD_SECONDS is 2m; expected a number", {"TRAIN": "digits", "LEAD_SECONDS": "2m"}),
        ("no program qstat on ", {"TRAIN": "digits", "without": "qstat"}),
        ("no program pbsdsh on ", {"TRAIN": "digits", "without": "pbsdsh"}),
        ('usage: export TRAIN="RECIPE [--key value ...]"', {}),
        ("is a quote missing?", {"TRAIN": "digits --output-dir 'a b"}),
        ("qsub -v turns each quote into a backslash", {"TRAIN": "digits --output-dir \\a b\\"}),
        ("no pbs/train.pbs in /nowhere: qsub from the folder with pbs/", {"ACCEL_TRAIN_ROOT": "/nowhere"}),
    ],
)
def test_what_cannot_be_is_one_line(expected: str, arguments: dict[str, str], tmp_path: Path) -> None:
    refused = train(tmp_path, **arguments)  # type: ignore[arg-type]
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert expected in refused.stderr


@pytest.mark.slow
def test_a_folder_without_a_checkout(tmp_path: Path) -> None:
    """`accel-train init` wrote the scripts; its .venv, with nothing but the wheel, is what they activate."""
    installed = wheel_environment.install(tmp_path / "wheel")
    folder = tmp_path / "project"
    subprocess.run([installed / "bin" / "accel-train", "init", folder], check=True, env={"PATH": "/usr/bin:/bin"})
    done = train(folder, TRAIN="recipe.yaml --epochs 1", ACCEL_TRAIN_ROOT="", PYTHONPATH="", PROCESSES_PER_NODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "recipe" / "job-123.server"
    assert json.loads((run / "result.json").read_text())["world_size"] == 2
    assert json.loads((run / "environment.json").read_text())["command"][0].startswith(str(installed))
