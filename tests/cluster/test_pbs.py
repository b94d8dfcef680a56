"""pbs/train.pbs with the variables and files that PBS sets; small scripts replace the commands of PBS.

They behave as a real OpenPBS with two nodes did.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import helpers
import pytest
import wheel_environment
import worlds
from pbs_record import qstat_record

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
        [[ -z $NO_SERVER ]] || { echo "pbs_iff: cannot connect to host" >&2; exit 1; }
        cat <<END
"""
    + qstat_record("$2", "${WALLTIME:-01:00:00}", "${GIVEN}")
    + "\nEND",
    # this site has no GPUs to count
    "qsub": """
        echo "qsub $*" >>"$LOG"; env -0 | sort -z | tr '\\0\\n' '\\n ' >"$(dirname "$LOG")/next"
        if [[ "$*" != *"select="* || "$*" == *ngpus* ]]; then echo "qsub: Unknown resource: ngpus" >&2; exit 1; fi
        echo 124.server""",
}
ALWAYS = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "DOCTOR": "off"}


def train(
    directory: Path,
    walltime: str = "01:00:00",
    without: str = "",
    job: str = "123.server",
    environment_lines: str = "",
    **variables: str,
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run the script as PBS would, with these variables of `qsub -V`. `environment_lines`: under ENVIRONMENT."""
    commands = directory / "bin"
    commands.mkdir(exist_ok=True, parents=True)
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\nLOG={directory}/log\nSPOOL={directory}\n{text}\n")
        (commands / name).chmod(0o755)
    if without:
        (commands / without).unlink()
    (directory / "nodes").write_text("127.0.0.1\n127.0.0.1\nlocalhost\nlocalhost\n")
    if not (directory / "accelerate_configs").exists():
        shutil.copytree(ROOT / "accelerate_configs", directory / "accelerate_configs")
    # PBS runs a copy of the script
    script = directory / f"{job}.SC"
    text = (ROOT / "pbs" / "train.pbs").read_text()
    script.write_text(text.replace("# End of ENVIRONMENT", f"{environment_lines}\n# End of ENVIRONMENT"))
    given = ALWAYS | variables
    words = [f"{name}={value}".replace(",", "\\,") for name, value in given.items()]
    environment = worlds.environment(
        PBS_JOBID=job, PBS_NODEFILE=str(directory / "nodes"), PBS_O_WORKDIR=str(directory), PBS_O_QUEUE="entry",
        WALLTIME=walltime, GIVEN="".join(f"{word},\n\t" for word in words), **given,
    )  # fmt: skip
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        ["bash", str(script)], env=environment | {"PATH": path}, cwd=directory,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip


def next_variables(directory: Path) -> dict[str, str]:
    """Return the variables that qsub would give to the next job of a chain."""
    pairs = [line.partition("=") for line in (directory / "next").read_text().splitlines()]
    shell = ("PATH", "HOME", "USER", "LOGNAME", "PWD", "SHLVL", "_", "OLDPWD")
    return {name: value for name, _, value in pairs if name not in shell}


CPU = {"PROCESSES_PER_NODE": "1"}


TRAINS = """
mkdir -p "$PWD/my run/slurm"; echo "$HF_TOKEN $MINE $*" >>trained
if (($(wc -l <trained) > 2)); then
    if [[ -n ${CODE:-} ]]; then echo $CODE >"$ACCEL_TRAIN_START/exit-code"; fi
    exit ${CODE:-0}
fi
until [[ -e $ACCEL_TRAIN_START/warned ]]; do sleep 0.1; done
echo "$PWD/my run" >"$ACCEL_TRAIN_START/run"; echo 10 >"$ACCEL_TRAIN_START/REQUEUE"
"""


def resubmitted(directory: Path, walltime: str, given: dict[str, str]) -> dict[str, str]:
    """Check that the first job has started both nodes and submitted the next one; return the variables of that.

    What PBS was told of the first job, it is told of the next: not what the script asks for, nor the sums over chunks.
    """
    log = (directory / "log").read_text().splitlines()
    assert sorted(log[:2]) == ["pbsdsh 0", "pbsdsh 2"]
    options = (
        f"-l filesystems=home:scratch -l place=scatter -l select=2:ncpus=2:mpiprocs=2 -l walltime={walltime} "
        "-q entry -A acct -N name -m a -W group_list=lab"
    )
    assert log[2:] == [f"qsub -V {options} {directory}/123.server.SC"]
    following = next_variables(directory)
    assert following == {**ALWAYS, **given, "CHAIN": "123.server"}
    return following


@pytest.mark.ci
def test_a_chain_of_jobs(tmp_path: Path) -> None:
    """Each job is warned and submits the next, which has the variables of the first, and no token of the site's."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "accelerate").write_text(f"#!/bin/bash\n{TRAINS}")
    (tmp_path / "first" / "accelerate").chmod(0o755)
    lines = f"export HF_TOKEN=secret PATH={tmp_path}/first:$PATH"
    given = {"TRAIN": "digits --output-dir 'my run'", "LEAD_SECONDS": "25", "MINE": "1,2 'x' \"y\"", **CPU}
    first = train(tmp_path, walltime="00:00:27", environment_lines=lines, **given)
    assert first.returncode == 0, first.stdout + first.stderr
    following = resubmitted(tmp_path, "00:00:27", given)
    assert (tmp_path / "my run" / "slurm" / "job").read_text() == "124.server\n"
    found = (tmp_path / "trained").read_text().splitlines()
    assert len(found) == 2 and all(line.startswith("secret 1,2 'x' \"y\" launch ") for line in found)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".SC"]
    assert [path.name for path in written if b"secret" in path.read_bytes()] == ["trained"]
    second = train(tmp_path, job="124.server", environment_lines=lines, **following)
    assert second.returncode == 0 and not [*tmp_path.glob("runs/starts/*")], second.stderr
    failed = train(tmp_path, job="125.server", environment_lines=lines, CODE="5", **following)
    assert failed.returncode == 5 and "To continue the run: cd " in failed.stderr, failed.stderr


@pytest.mark.slow
def test_one_launcher_a_node_and_again_after_the_time_limit(tmp_path: Path) -> None:
    # the time limit is so near that the warning comes while the program starts: the first update obeys it
    words = "digits --epochs 2 --output-dir 'my run'"
    given = {"TRAIN": words, "LEAD_SECONDS": "11", "MINE": "1,2 'x' \"y\"", **CPU}
    secret = "export HF_TOKEN=secret"  # of the site, and not of this submission
    first = train(tmp_path, walltime="00:00:12", environment_lines=secret, **given)
    run = tmp_path / "my run"
    assert first.returncode == 0, first.stdout + first.stderr
    following = resubmitted(tmp_path, "00:00:12", given)
    assert (run / "slurm" / "job").read_text() == "124.server\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"HF_TOKEN" in path.read_bytes()
                and path.suffix != ".SC"]  # fmt: skip
    assert not (run / "result.json").exists() and "Stopped by the warning before the job's end" in first.stdout
    second = train(tmp_path, job="124.server", **following)
    assert second.returncode == 0, second.stdout + second.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["updates"]) == (2, 60)
    program = json.loads((run / "environment.json").read_text())["command"][0]
    assert program == str(ROOT / "accel_train" / "train.py")  # the nodes have the job's PYTHONPATH, if it has one
    assert "continuing after update" in second.stdout
    assert (run / "slurm" / "job").read_text() == "124.server\n" and not [*tmp_path.glob("runs/starts/*")]
    # once more: nothing is left to do
    assert "my run holds a finished run" in train(tmp_path, TRAIN=words, **CPU).stdout


@pytest.mark.slow
def test_a_failed_run_fails_though_pbsdsh_does_not_say_so(tmp_path: Path) -> None:
    wrong = train(tmp_path, TRAIN="digits --epochs nonsense", **CPU)
    assert wrong.returncode == 2, wrong.stdout + wrong.stderr
    assert "failed with exit code 2" in wrong.stderr and "Correct what it says and submit the job" in wrong.stderr
    assert "pbsdsh: task" not in wrong.stdout  # each node's shell ends with 0, and leaves the code in a file
    # of a run that had begun, the settings that it had then
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text("base: digits\nepochs: 1\n")
    later = train(tmp_path, TRAIN="digits --epochs nonsense --output-dir 'my run'", **CPU)
    assert later.returncode == 2 and "qsub -V -l filesystems=" in later.stderr
    train_words = re.search(r"TRAIN=('.*') qsub", later.stderr)
    assert train_words and "nonsense" not in train_words[1]
    done = train(tmp_path, TRAIN=shlex.split(train_words[1])[0])
    assert done.returncode == 0 and json.loads((run / "result.json").read_text())["epochs"] == 1, done.stderr


HELD_BACK = 'if [[ " $* " == *" --machine_rank 1 "* ]]; then {}; fi\nexec {}/accelerate "$@"\n'


def held_back(folder: Path, how: str) -> str:
    """Make a launcher that does this on the second node; return the line of ENVIRONMENT that finds it."""
    (folder / "first").mkdir()
    (folder / "first" / "accelerate").write_text("#!/bin/bash\n" + HELD_BACK.format(how, Path(sys.executable).parent))
    (folder / "first" / "accelerate").chmod(0o755)
    return f"export PATH={folder}/first:$PATH"


@pytest.mark.ci
def test_a_node_that_fails_ends_the_others(tmp_path: Path) -> None:
    line = held_back(tmp_path, 'sleep 3; echo "no module here" >&2; exit 5')
    began = time.monotonic()
    failed = train(tmp_path, TRAIN="digits --epochs 1", environment_lines=line, **CPU)
    assert failed.returncode == 5, failed.stdout + failed.stderr
    assert time.monotonic() - began < 60  # the other node would wait for it for 10 minutes
    assert "killing task" in failed.stdout and "no module here" in failed.stderr


@pytest.mark.slow
def test_a_node_that_does_not_come_ends_the_job_in_time(tmp_path: Path) -> None:
    """The launcher's own wait is that of --rendezvous-timeout-seconds, and not ten minutes."""
    line = held_back(tmp_path, 'rm "$ACCEL_TRAIN_START/nodes/localhost"; exec sleep 300')
    began = time.monotonic()
    missing = train(tmp_path, TRAIN="digits --epochs 1 --rendezvous-timeout-seconds 3", environment_lines=line, **CPU)
    assert missing.returncode == 1, missing.stdout + missing.stderr
    assert time.monotonic() - began < 90
    assert "no task could write to" in missing.stderr and "on localhost: are these nodes up" in missing.stderr


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("a walltime of 60 s is too short: the warning comes 120 s", {"TRAIN": "digits", "walltime": "00:01:00"}),
        ("LEAD_SECONDS is 2m; expected a number", {"TRAIN": "digits", "LEAD_SECONDS": "2m"}),
        ("PROCESSES_PER_NODE is two; expected a number", {"TRAIN": "digits", "PROCESSES_PER_NODE": "two"}),
        ("no accelerate config nowhere.yaml", {"TRAIN": "digits", "ACCELERATE_CONFIG": "nowhere.yaml"}),
        ("no program qstat on ", {"TRAIN": "digits", "without": "qstat"}),
        ("cannot ask PBS about this job (see above), nor submit the next", {"TRAIN": "digits", "NO_SERVER": "1"}),
        ("no program pbsdsh on ", {"TRAIN": "digits", "without": "pbsdsh"}),
        ('usage: export TRAIN="RECIPE [--key value ...]"', {}),
        ("is a quote missing?", {"TRAIN": "digits --output-dir 'a b"}),
        ("qsub -v turns each quote into a backslash", {"TRAIN": "digits --output-dir \\a b\\"}),
    ],
)
def test_what_cannot_be_is_one_line(expected: str, arguments: dict[str, str], tmp_path: Path) -> None:
    refused = train(tmp_path, **arguments)  # type: ignore[arg-type]
    assert refused.returncode == 2 and refused.stderr.count("error:") == 1
    assert expected in refused.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_folder_without_a_checkout(tmp_path: Path) -> None:
    """`accel-train init` wrote the scripts; its .venv, with nothing but the wheel, is what they activate."""
    installed = wheel_environment.install(tmp_path / "wheel")
    folder = tmp_path / "project"
    subprocess.run([installed / "bin" / "accel-train", "init", folder], check=True, env={"PATH": "/usr/bin:/bin"})
    done = train(folder, TRAIN="recipe.yaml --epochs 1", PYTHONPATH="", PROCESSES_PER_NODE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "recipe" / "job-123.server"
    assert json.loads((run / "result.json").read_text())["world_size"] == 2
    assert json.loads((run / "environment.json").read_text())["command"][0].startswith(str(installed))
