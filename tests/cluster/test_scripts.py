"""The job scripts without a cluster: their own decisions, and their style."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers
import pytest

ROOT = helpers.ROOT
SLURM_SCRIPTS = ("train.sbatch", "tasks.sbatch")
SLURM = {  # what Slurm sets in each batch script; everything else may be missing
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "4",
}  # fmt: skip
PROGRAM = 'case "$*" in *after-job*) exit 1;; *) echo "training starts: $*"; eval "${TRAINING:-exit 3}";; esac'
COMMANDS = {
    # the task is on this host
    "srun": 'export BATCH=$PPID; while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 SLURM_PROCID=0 "$@"',
    "scontrol": "case $2 in hostnames) echo n1; echo n2;; node) echo Gres=$GRES;; *) echo scontrol $*;; esac",
    "scancel": 'echo "$*" >scancelled',
    "nvidia-smi": "exit 127",
    "accelerate": PROGRAM,
    "python": PROGRAM,
}


def folder_of_scripts(folder: Path, commands: dict[str, str] = COMMANDS) -> Path:
    """Make a folder with the scripts, and with commands that replace those of a cluster."""
    for part in ("slurm", "pbs", "accelerate_configs"):
        shutil.copytree(ROOT / part, folder / part)
    (folder / "bin").mkdir()
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return folder


def job(script: str, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm does; the training ends with 3."""
    if not folder.exists():
        folder_of_scripts(folder)
    environment = {"PATH": f"{folder}/bin:/usr/bin:/bin", "GRES": "gpu:2"} | SLURM | variables
    command = ["bash", f"slurm/{script}", *(words or ("digits",))]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_a_warning_to_the_script_is_noted_and_passed_on(script: str, tmp_path: Path) -> None:
    """The script goes on waiting for its srun, and ends with the training's code. A TERM does not end it either."""
    warn = "rm -f scancelled; kill -USR1 $BATCH; until [[ -s scancelled ]]; do sleep 0.1; done"
    end = 'kill -TERM $BATCH; until [[ -e "$ACCEL_TRAIN_START/ended" ]]; do sleep 0.1; done; exit 3'
    done = job(script, tmp_path / "a b", TRAINING=f"{warn}; {end}")
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "a b" / "scancelled").read_text() == "--signal=USR1 7\n"
    (start,) = (tmp_path / "a b" / "runs" / "starts" / "7").iterdir()
    assert {path.name for path in start.iterdir()} == {"warned", "ended", "nodes"}
    array = job(script, tmp_path / "a b", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2", TRAINING=f"{warn}; {end}")
    assert array.returncode == 3 and (tmp_path / "a b" / "scancelled").read_text() == "--signal=USR1 5_2\n"


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_if_after_job_cannot_run_the_training_decides(script: str, tmp_path: Path) -> None:
    asks = 'echo 10 >"$ACCEL_TRAIN_START/REQUEUE"'
    done = job(script, tmp_path / "job", TRAINING=asks)
    assert done.returncode == 0 and "scontrol requeue 7" in done.stdout
    ended = job(script, tmp_path / "job", TRAINING=f'{asks}; touch "$ACCEL_TRAIN_START/ended"; exit 5')
    assert ended.returncode == 5 and "requeue" not in ended.stdout
    for code in (0, 3):
        assert job(script, tmp_path / "job", TRAINING=f"exit {code}").returncode == code


@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_the_words_reach_the_training_as_they_are(script: str, tmp_path: Path) -> None:
    words = ("my recipe.yaml", "--output-dir", 'it\'s "a" $HOME\\run', "--rendezvous-timeout-seconds", "7")
    each = job(script, tmp_path / "job", *words, TRAINING='printf "<%s>" "$@"; exit 3').stdout
    assert "<-m><accel_train.train>" + "".join(f"<{word}>" for word in words) in each
    assert ("<--rdzv_conf><timeout=7>" in each) == (script == "train.sbatch")


def test_processes_of_a_node(tmp_path: Path) -> None:
    """What the user says, what Slurm gave, or, where Slurm does not count GPUs, what the driver sees. Without GPUs the
    processes compute in float32, unless the user names accelerate's config file."""

    def count(**variables: str) -> tuple[str, str]:
        text = job("train.sbatch", tmp_path / "job", **variables).stdout
        found = re.search(r"--config_file (\S+) --num_machines 2 --num_processes (\d+)", text)
        assert found, text
        return found[2], Path(found[1]).stem

    assert count(PROCESSES_PER_NODE="3", SLURM_GPUS_ON_NODE="2") == ("6", "multi_node")
    assert count(SLURM_GPUS_ON_NODE="2") == ("4", "multi_node")
    smi = tmp_path / "job" / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/bash\necho GPU 0: A100; echo GPU 1: A100; echo GPU 2: A100\n")
    assert count() == ("2", "multi_cpu")  # the job asked for none: those that the driver sees are others'
    assert count(PROCESSES_PER_NODE="3") == ("6", "multi_cpu")
    assert count(ACCELERATE_CONFIG="accelerate_configs/cpu.yaml") == ("2", "cpu")
    assert count(GRES="(null)") == ("6", "multi_node")
    smi.write_text("#!/bin/bash\nexit 9\n")
    assert count(GRES="(null)") == ("2", "multi_cpu")


def test_one_process_has_no_launcher_but_reads_accelerates_file(tmp_path: Path) -> None:
    show = 'echo "<$0 $* $ACCEL_TRAIN_LAUNCHER_CONFIG>"; exit 3'
    alone = job("train.sbatch", tmp_path / "job", SLURM_NNODES="1", SLURM_GPUS_ON_NODE="1", TRAINING=show).stdout
    assert "bin/python -m accel_train.train digits accelerate_configs/multi_node.yaml>" in alone
    task = job("tasks.sbatch", tmp_path / "job", TRAINING=show).stdout
    assert "bin/python -m accel_train.train digits accelerate_configs/multi_cpu.yaml>" in task


def test_the_port_is_another_after_a_restart(tmp_path: Path) -> None:
    def port(**variables: str) -> int:
        text = job("train.sbatch", tmp_path / "job", **variables).stdout
        return int(re.search(r"--main_process_port (\d+)", text)[1])  # type: ignore[index]

    first = port(SLURM_JOB_ID="4711")
    assert port(SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1") == first + 1009
    assert port(MASTER_PORT="29999") == 29999


@pytest.mark.slow
@pytest.mark.parametrize("script", SLURM_SCRIPTS)
def test_no_variable_ends_a_job_in_silence(script: str, tmp_path: Path) -> None:
    """Each variable that the script reads, missing, empty or with a value that it should not have: the training starts,
    or one line says what is wrong."""
    read = read_variables(f"slurm/{script}")
    assert {"ACCELERATE_CONFIG", "SLURM_GPUS_ON_NODE", "DOCTOR"} <= read
    values = [(name, value) for name in sorted(read) for value in ("", "a b", "08", "-1", "9" * 20)]
    choices = [("NOTHING", "1"), *(each for each in values if not each[0].startswith("SLURM") or not each[1])]

    def run(number: int) -> subprocess.CompletedProcess[str]:
        return job(script, tmp_path / str(number), **dict([choices[number]]))

    with ThreadPoolExecutor(4) as pool:
        for (name, value), done in zip(choices, pool.map(run, range(len(choices))), strict=True):
            assert "syntax error" not in done.stderr, (name, value, done.stderr)
            if done.returncode == 2:
                assert value and done.stderr.count("\n") == 1 and "error: " in done.stderr, (name, value, done.stderr)
            else:
                assert done.returncode == 3 and "training starts" in done.stdout, (name, value, done.stderr)


def read_variables(*files: str) -> set[str]:
    """Return the variables that these scripts read and may not find."""
    text = "".join((ROOT / file).read_text() for file in files)
    ours = {"ACCEL_TRAIN_START", "JOB", "PATH", "HOME", "HOSTNAME", "PWD", "SECONDS", "BASH_REMATCH", "SRUN_OPTIONS"}
    return set(re.findall(r"\$\{?#?([A-Z][A-Z0-9_]+)", text)) - SLURM.keys() - ours


def test_the_docs_name_the_variables_that_the_scripts_read() -> None:
    """And the reverse."""
    read = {
        name
        for name in read_variables(*(f"slurm/{script}" for script in SLURM_SCRIPTS), "pbs/train.pbs")
        if not name.startswith(("SLURM", "PBS"))
    }
    page = (ROOT / "docs" / "clusters.md").read_text()
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert len(table) >= 6 and table <= {*read, "MAX_REQUEUES"}
    assert {name for name in read - {"CHAIN"} if not re.search(rf"\b{name}\b", page)} == set()


def test_scripts_are_short_and_read_no_other() -> None:
    """A user reads one of them in some minutes, and copies that one."""
    scripts = {path: path.read_text() for path in (*ROOT.glob("slurm/*"), *ROOT.glob("pbs/*"))}
    assert len(scripts) == 3
    for path, text in scripts.items():
        code = re.sub(r"(?m)^ *#.*", "", text)
        read = re.findall(r"(?:source|\s\.) \"?(\S+)", code)
        assert {name.strip('";') for name in read} <= {".venv/bin/activate", "$1"}, path
        assert len(text.splitlines()) <= 135, path
        assert "# ENVIRONMENT: " in text and "# End of ENVIRONMENT" in text, path
    start, end = "# First, because", "gpus="
    one, other = (scripts[ROOT / "slurm" / name] for name in SLURM_SCRIPTS)
    assert one[one.index(start) : one.index(end)] == other[other.index(start) : other.index(end)]
    assert one[one.index("step=$!") :] == other[other.index("step=$!") :]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    scripts = [*ROOT.glob("slurm/*"), *ROOT.glob("pbs/*"), *ROOT.glob("tests/cluster/*.sh")]
    assert len(scripts) >= 4
    done = subprocess.run(
        ["shellcheck", "-x", "--exclude=SC1091", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
