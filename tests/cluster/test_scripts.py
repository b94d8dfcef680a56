"""The job scripts without a cluster: their own decisions, and their style."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers
import pytest

ROOT = helpers.ROOT
WITH_GPUS = {"SLURM_GPUS_ON_NODE": "2"}  # otherwise the script asks PyTorch, which takes seconds


def test_a_stop_without_progress_is_requeued_three_times(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho scontrol $*\n")
    scontrol.chmod(0o755)
    run = tmp_path / "runs" / "digits" / "job-7"
    script = f"source {ROOT}/slurm/common.sh; begin_run digits; echo $UPDATE > $RUN/REQUEUE; end_run 0"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ACCEL_TRAIN_ROOT": str(ROOT), "SLURM_JOB_ID": "7", **WITH_GPUS}
    outcomes = []
    for update in ("10", "20", "20", "20", "20", "30"):
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment | {"UPDATE": update}, capture_output=True, text=True
        )
        outcomes.append((done.returncode, "scontrol requeue 7" in done.stdout, "without progress" in done.stderr))
    assert outcomes == [(0, True, False)] * 4 + [(1, False, True)] + [(0, True, False)]
    assert (run / "slurm" / "requeues").read_text().split() == ["10", "20", "20", "20", "20", "30"]


def test_a_job_whose_run_another_one_owns_changes_and_obeys_nothing_of_its(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "slurm" / "start-7.0" / "nodes").mkdir(parents=True)
    others = [
        run / name
        for name in ("owner.json", "REQUEUE", "STOP", "slurm/start-7.0/exit-code", "slurm/start-7.0/nodes/n1")
    ]
    for path in others:
        path.write_text("10\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho scontrol $*\n")
    (tmp_path / "scontrol").chmod(0o755)
    script = f"source {ROOT}/slurm/common.sh; begin_run digits --output-dir {run}; echo 2 >$START/exit-code; "
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ACCEL_TRAIN_ROOT": str(ROOT), "SLURM_JOB_ID": "8", **WITH_GPUS}
    # srun says 1 or 137 of a rank that was refused with 2
    done = subprocess.run(["bash", "-c", f"{script} end_run 1"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert b"scontrol requeue 8" not in done.stdout
    assert [path.read_text() for path in others] == ["10\n"] * 5


def bash(script: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a script that uses slurm/common.sh, in an almost empty environment."""
    path = f"{cwd}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(cwd), "ACCEL_TRAIN_ROOT": str(ROOT), "ACCEL_TRAIN_SITE": str(cwd / "site")}
    return subprocess.run(
        ["bash", "-c", f"source {ROOT}/slurm/common.sh; {script}", "job"],
        cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_only_this_start_asks_for_a_requeue(tmp_path: Path) -> None:
    """An old REQUEUE, or one of the run's owner where this start was refused, does not hide a failure."""
    run = tmp_path / "runs" / "digits" / "job-7"
    run.mkdir(parents=True)
    (run / "REQUEUE").write_text("10\n")
    os.utime(run / "REQUEUE", (1, 1))
    slurm = WITH_GPUS | {"SLURM_JOB_ID": "7"}
    failed = bash("begin_run digits; echo 137 >$START/exit-code; end_run 1", tmp_path, **slurm)
    assert failed.returncode == 137 and "failed with exit code 137" in failed.stderr
    owned = "begin_run digits; echo 2 >$START/exit-code; touch $RUN/REQUEUE; end_run 1"
    refused = bash(owned, tmp_path, PBS_JOBID="7", **WITH_GPUS)
    assert refused.returncode == 2 and "requeueing" not in refused.stdout
    # and it says how to go on, also when Slurm has forgotten the job
    hint = f"sbatch --nodes=1 {ROOT}/job digits --output-dir runs/digits/job-7"
    assert f"cd {tmp_path} && ACCEL_TRAIN_ROOT={ROOT} " in failed.stderr and hint in failed.stderr
    assert "scontrol" not in failed.stderr and "slurm_script" not in failed.stderr


@pytest.mark.slow
def test_a_refused_command_is_not_the_one_to_continue_with(tmp_path: Path) -> None:
    words, end = "begin_run digits --epochs nonsense", "echo 2 >$START/exit-code; end_run 1"
    first = bash(f"{words}; {end}", tmp_path, SLURM_JOB_ID="7")
    assert first.returncode == 2 and "Correct what it says and submit the job again" in first.stderr
    assert "sbatch" not in first.stderr and "nonsense" not in first.stderr
    run = tmp_path / "runs" / "digits" / "job-7"
    (run / "config.yaml").touch()
    later = bash(f"{words}; {end}", tmp_path, SLURM_JOB_ID="7")
    assert later.returncode == 2 and "nonsense" not in later.stderr
    assert later.stderr.rstrip().endswith(f"sbatch --nodes=1 {ROOT}/job {run}/config.yaml --output-dir {run}")


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_a_submission_from_elsewhere_is_one_line(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "slurm" / script), "digits"], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    line = f"error: no slurm/{script} in {tmp_path}: sbatch from the folder with slurm/, or export ACCEL_TRAIN_ROOT="
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1


def test_a_sites_file_runs_as_in_an_ordinary_shell(tmp_path: Path) -> None:
    """Modules return 1, read variables that are not set, and are not there at all for a user of csh."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('module() { echo "module $* $UNSET"; return 1; }\n')
    (tmp_path / "site").write_text(
        "module purge\nfalse | true\nsite_environment() { module load $ALSO_UNSET; cd /nowhere 2>&-; }\n"
    )
    kept = bash("use_site; echo $-; set -o | grep pipefail", tmp_path, MODULESHOME=str(tmp_path))
    assert kept.returncode == 0 and kept.stderr == "", kept.stderr
    first, second, options, pipefail = kept.stdout.splitlines()
    assert (first, second) == ("module purge ", "module load ") and {"e", "u"} <= set(options) and "on" in pipefail
    # what does end the shell, or leaves no program behind, says so
    (tmp_path / "site").write_text(": ${PROJECT:?is not set}\n")
    ended = bash("use_site; echo further", tmp_path)
    assert ended.returncode != 0 and ended.stdout == ""
    assert "PROJECT: is not set" in ended.stderr
    assert f"{tmp_path}/site, or what it calls, ended the shell on" in ended.stderr
    (tmp_path / "site").write_text("PATH=/usr/bin:/bin\nsite_environment() { return 1; }\n")
    missing = bash("use_site; echo further", tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "no program accelerate on" in missing.stderr and "site_environment in" in missing.stderr


@pytest.mark.slow
def test_processes_of_a_node(tmp_path: Path) -> None:
    """What the user says, what Slurm gave, or, where Slurm does not count GPUs, what PyTorch sees.

    Without GPUs the processes compute in float32, unless the user names accelerate's config file.
    """
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=n1 Gres=$GRES Partitions=gpu\n")
    scontrol.chmod(0o755)
    (tmp_path / "torch.py").write_text("class accelerator: device_count = staticmethod(lambda: 4)\n")
    script = (
        "container=(env PYTHONPATH=.); begin_run digits >log; count_processes 1; "
        "echo $PROCESSES_PER_NODE $(basename $ACCELERATE_CONFIG)"
    )

    def count(gres: str, **variables: str) -> str:
        return bash(script, tmp_path, SLURMD_NODENAME="n1", GRES=gres, **variables).stdout.strip()

    assert count("gpu:8", PROCESSES_PER_NODE="3", SLURM_GPUS_ON_NODE="2") == "3 multi_node.yaml"
    assert count("gpu:8", SLURM_GPUS_ON_NODE="2") == "2 multi_node.yaml"
    assert "in float32" not in (tmp_path / "log").read_text()
    assert count("gpu:a100:8(S:0-1)") == "1 multi_cpu.yaml"  # the job asked for none: those it sees are others'
    assert "no GPUs in this job: it computes on CPUs, in float32" in (tmp_path / "log").read_text()
    assert count("gpu:8", PROCESSES_PER_NODE="3") == "3 multi_cpu.yaml"
    assert count("gpu:8", ACCELERATE_CONFIG=str(ROOT / "accelerate_configs/cpu.yaml")) == "1 cpu.yaml"
    assert count("(null)") == "4 multi_node.yaml"
    (tmp_path / "torch.py").write_text("class accelerator: device_count = staticmethod(lambda: 0 + 0)\n")
    assert count("(null)") == "1 multi_cpu.yaml"
    (tmp_path / "torch.py").unlink()
    assert bash(script, tmp_path).stdout.strip() >= "1"  # PBS, with the real torch: one process on the CPU


def test_nodes_with_different_numbers_of_gpus_are_refused(tmp_path: Path) -> None:
    """--gpus=3 on two nodes would start four processes. The lines are those of Slurm 22.05."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "JobId=7 NodeList=n[1-3] JOB_GRES=gpu:3  $NODES MinCPUsNode=1"\n')
    scontrol.chmod(0o755)
    one, two = (f"  Nodes={nodes} CPU_IDs=7 Mem=0 GRES=" for nodes in ("n1", "n[2-3]"))

    def count(nodes: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        script = "gpus=''; count_processes 3; echo $PROCESSES_PER_NODE"
        return bash(script, tmp_path, NODES=nodes, SLURM_JOB_ID="7", SLURM_GPUS_ON_NODE="2", **variables)

    for even in ("", f"{one}gpu:2(IDX:0-1)", f"{one}gpu:a100:1(IDX:0),gpu:h100:1(IDX:4){two}gpu:2(IDX:0,3)"):
        assert count(even).stdout == "2\n", even
    refused = count(f"{one}gpu:a100:2(IDX:0-1){two}gpu:a100:1(IDX:0)")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "(2 on n1, 1 on n[2-3])" in refused.stderr and "--gpus-per-node" in refused.stderr
    assert "(2 on n1, 0 on n[2-3])" in count(f"{one}gpu:2(IDX:0-1){two}").stderr
    assert count(f"{one}gpu:2(IDX:0-1){two}", PROCESSES_PER_NODE="1").stdout == "1\n"


def test_the_port_is_another_after_a_restart_and_never_one_that_is_taken(tmp_path: Path) -> None:
    def port(**variables: str) -> int:
        return int(bash("find_port", tmp_path, **variables).stdout)

    first = port(SLURM_JOB_ID="4711")
    with socket.create_server(("127.0.0.1", first)):
        assert port(SLURM_JOB_ID="4711") == first + 1
    assert port(SLURM_JOB_ID="4711", SLURM_RESTART_COUNT="1") == first + 1009
    assert port(PBS_JOBID="4711[3].server") == first


def test_the_environment_of_a_task(tmp_path: Path) -> None:
    """TMPDIR stays where the site made it on a local disk; MASTER_ADDR is the job's, whatever a node calls itself."""
    (tmp_path / "site").write_text("export MASTER_ADDR=$(hostname)-ib MASTER_PORT=1\n")
    (tmp_path / "nodes").mkdir()
    script = "enter_task; echo $TMPDIR $MASTER_ADDR $MASTER_PORT"

    def task(**variables: str) -> str:
        start = {"ACCEL_TRAIN_START": str(tmp_path), "MASTER_PORT": "7", "MASTER_ADDR": "n1"}
        return bash(script, tmp_path, **start, **variables).stdout.strip()

    assert task(TMPDIR=str(tmp_path)) == f"{tmp_path} n1 7"
    assert task(TMPDIR="/nowhere") == task(TMPDIR="/proc/1") == task() == "/tmp n1 7"
    assert task(TMPDIR=str(tmp_path), SLURM_TMPDIR="/var/tmp") == "/var/tmp n1 7"


def test_a_warning_is_noted_while_nobody_else_can(tmp_path: Path) -> None:
    """The launcher, which would die of it, ignores it; the shell that waits for it leaves word for the ranks."""
    script = (
        f"source {ROOT}/slurm/common.sh; on_it() {{ sleep 0.2; exec bash -c 'touch begun; sleep 2; exit 5'; }}; "
        'stand_by on_it; exit "$code"'
    )
    environment = os.environ | {"ACCEL_TRAIN_START": str(tmp_path), "ACCEL_TRAIN_ROOT": str(ROOT)}
    task = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment, start_new_session=True)

    def until(name: str) -> None:
        deadline = time.monotonic() + 30
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    until("begun")
    os.killpg(task.pid, signal.SIGUSR1)  # as Slurm does it, to each process of the step
    until("warned")
    os.kill(task.pid, signal.SIGTERM)  # which it outlives, too, for its child may be saving
    assert task.wait(30) == 5
    assert abs(int((tmp_path / "warned").read_text()) - time.time()) < 30


def test_a_short_warning_is_measured(tmp_path: Path) -> None:
    """sbatch --signal=… counts, not what the script says: from the warning to the end that Slurm had set."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "JobId=7 EndTime=$(date -d @$END +%FT%T) Deadline=N/A"\n')
    scontrol.chmod(0o755)
    checkpoint = '{"kind": "checkpoint", "seconds": 8.2}'
    script = f"begin_run digits; echo '{checkpoint}' >$RUN/metrics.jsonl; echo 1000 >$START/warned; warn_of_short_lead"
    slurm = WITH_GPUS | {"SLURM_JOB_ID": "7"}
    short, long = (bash(script, tmp_path, END=end, **slurm).stderr for end in ("1010", "1060"))
    assert "a save takes 8 s, the warning came 10 s before the end: sbatch --signal=USR1@32" in short
    assert long == ""


SLURM = {  # what Slurm sets in each batch script; everything else may be missing
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip


BY_WORDS = {
    "srun": 'eval "$SRUN"; echo "training starts, DOCTOR is $DOCTOR"; exit 3',
    "scontrol": "if [[ $2 == hostnames ]]; then echo n1; echo n2; else echo NodeName=n1 Gres=gpu:2; fi",
    "accelerate": "exit 3",
}


def job(
    script: str, cwd: Path, root: Path = ROOT, commands: dict[str, str] = BY_WORDS, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a batch script with these commands; the training fails with 3."""
    (cwd / "bin").mkdir(exist_ok=True, parents=True)
    for name, text in commands.items():
        (cwd / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (cwd / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{cwd}/bin:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(root)}
    words = ["2", "digits"] if script == "scaling.sbatch" else ["digits", "--output-dir", str(cwd / "run")]
    return subprocess.run(
        ["bash", str(root / "slurm" / script), *words],
        cwd=cwd, env=environment | SLURM | variables, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("script", ["multi_node.sbatch", "tasks.sbatch"])
def test_a_warning_that_only_the_batch_script_gets_is_passed_on(script: str, tmp_path: Path) -> None:
    """sbatch --signal=B:USR1@120. The script goes on waiting for its srun, and ends with its code."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scancel").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/scancel\n')
    (tmp_path / "bin" / "scancel").chmod(0o755)
    srun = 'kill -USR1 $PPID; for i in {1..100}; do [[ -s "$SEEN" ]] && break; sleep 0.1; done; exit 3'
    done = job(script, tmp_path, SRUN=srun, SEEN=str(tmp_path / "scancel"))
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 7\n"
    assert (tmp_path / "run" / "slurm" / "start-7.0" / "warned").read_text().strip().isdigit()


@pytest.mark.parametrize("script", ["single_node.sbatch", "multi_node.sbatch", "tasks.sbatch"])
def test_the_training_is_told_of_the_doctor(script: str, tmp_path: Path) -> None:
    """With no other variable set."""
    for value, told in ((None, "print"), ("", "print"), ("strict", "strict"), ("off", "off")):
        given = {} if value is None else {"DOCTOR": value}
        done = job(script, tmp_path, **given)  # type: ignore[arg-type]
        assert "unbound" not in done.stderr
        assert done.returncode == 3 and f"training starts, DOCTOR is {told}\n" in done.stdout, (value, done.stderr)
        assert "To continue the run: cd " in done.stderr


def read_variables(*files: str) -> set[str]:
    """Return the variables that these scripts read and may not find."""
    text = "".join((ROOT / file).read_text() for file in files)
    ours = {"START", "RUN", "JOB", "PATH", "HOSTNAME", "PWD", "SECONDS", "SLURM_SUBMIT_DIR"}
    return set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text)) - SLURM.keys() - ours


def test_each_option_of_sbatch_is_asked_for_again(tmp_path: Path) -> None:
    """On twice as many nodes. The line is that of Slurm 22.05."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(
        "#!/bin/sh\necho JobId=7 Account=acct QOS=long TimeLimit=00:30:00 ReqNodeList='(null)' ExcNodeList=n[3-4] "
        "OverSubscribe=NO Features=ib Reservation=class Licenses=x:1 TresPerNode=gres:gpu:a100:2\n"
    )
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    slurm = {
        "JOB_NAME": "n", "JOB_PARTITION": "p", "MEM_PER_NODE": "2G", "MEM_PER_CPU": "1G", "MEM_PER_GPU": "8G",
        "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "3", "GPUS_PER_TASK": "1", "GPUS_PER_SOCKET": "4", "GPUS": "a100:4",
    }  # fmt: skip
    given = {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    asked = bash('job_options 4; echo "${options[*]}"', tmp_path, **given)
    assert asked.stdout.split() == [
        "--nodes=4", "--job-name=n", "--partition=p", "--time=00:30:00", "--account=acct", "--qos=long",
        "--constraint=ib", "--reservation=class", "--licenses=x:1", "--exclude=n[3-4]", "--mem=2G",
        "--mem-per-cpu=1G", "--mem-per-gpu=8G", "--ntasks-per-node=2", "--cpus-per-task=3", "--gres=gpu:a100:2",
        "--gpus-per-task=1", "--gpus-per-socket=4", "--exclusive", "--gpus=a100:8",
    ], asked.stderr  # fmt: skip
    assert (
        bash('job_options 4; echo "${options[@]: -1}"', tmp_path, **given | {"SLURM_GPUS": "3"}).stdout == "--gpus=6\n"
    )
    read = re.findall(r"SLURM_(?:[A-Z]+_PER_[A-Z]+|GPUS)\b", (ROOT / "slurm" / "common.sh").read_text())
    assert {*read} <= {*given}


def test_the_docs_name_the_variables_that_the_scripts_read() -> None:
    """And the reverse: the tests below give values to all of them."""
    files = [str(path.relative_to(ROOT)) for path in ROOT.glob("slurm/*.s*")]
    read = {name for name in read_variables(*files, "pbs/train.pbs") if not name.startswith(("SLURM", "PBS"))}
    page = (ROOT / "docs" / "clusters.md").read_text()
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert len(table) >= 6 and table <= read
    between = {"ACCEL_TRAIN_START", "CONTINUE", "NODES", "RANK", "SCALING"}  # set by the scripts or a launcher
    assert {name for name in read - between if not re.search(rf"\b{name}\b", page)} == set()


PROGRAM = """
case "$*" in
    *"torch.accelerator"*) echo 2 ;;
    *" meet "* | *" report "*) exit 0 ;;
    *"accel_train doctor"*) exit 3 ;;
    *) echo "training starts"; exit 3 ;;
esac"""
REAL_TASKS = {  # srun starts the task on this host
    "srun": 'while [[ $1 != bash ]]; do shift; done; SLURM_NODEID=0 SLURM_PROCID=0 "$@"',
    "scontrol": "if [[ $2 == hostnames ]]; then echo n1; echo n2; else echo NodeName=n1; fi",
    "accelerate": PROGRAM,
    "python": PROGRAM,
}


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_no_missing_variable_ends_a_job(script: str, tmp_path: Path) -> None:
    """None, and all but one of the variables that the script and its tasks read."""
    root = tmp_path / "root"  # without a .venv, which would bring the real programs
    for folder in ("slurm", "accelerate_configs"):
        shutil.copytree(ROOT / folder, root / folder)
    everything = dict.fromkeys(read_variables(f"slurm/{script}", "slurm/common.sh", "slurm/rank.sh"), "1") | {
        "ACCEL_TRAIN_ROOT": str(root), "ACCELERATE_CONFIG": str(root / "accelerate_configs" / "cpu.yaml"),
        "DOCTOR": "print", "PBS_JOBID": "7", "SCALING": "scaling", "TMPDIR": str(tmp_path),
    }  # fmt: skip
    choices = {"none": {}} | {  # type: ignore[var-annotated]
        name: {other: value for other, value in everything.items() if other != name} for name in everything
    }

    def run(name: str) -> "subprocess.CompletedProcess[str]":
        return job(script, tmp_path / name, root, REAL_TASKS, **choices[name])

    with ThreadPoolExecutor(4) as pool:
        for name, done in zip(choices, pool.map(run, choices), strict=True):
            assert "unbound" not in done.stderr and "syntax error" not in done.stderr, (name, done.stderr)
            assert done.returncode == 3, (name, done.stdout, done.stderr)
            assert ("training starts" in done.stdout) == (script != "preflight.sbatch"), (name, done.stdout)
            assert "To continue the run: cd " in done.stderr, (name, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_no_value_ends_a_job(script: str, tmp_path: Path) -> None:
    """Each variable that the script and its tasks read, empty or with a value that it should not have: at most one
    line, at once."""
    root = tmp_path / "root"  # without a .venv, which would bring the real programs
    for folder in ("slurm", "accelerate_configs"):
        shutil.copytree(ROOT / folder, root / folder)
    read = read_variables(f"slurm/{script}", "slurm/common.sh", "slurm/rank.sh")
    assert {"MAX_REQUEUES", "TMPDIR", "ACCEL_TRAIN_SITE"} <= read
    choices = [
        (name, value)
        for name in sorted(read - {"PROCESSES_PER_NODE"})
        for value in (("",) if name.startswith(("SLURM", "PBS")) else ("", "a b", "08", "-1", "9" * 20))
    ] + [("PROCESSES_PER_NODE", value) for value in ("", "a b", "0", "08", "-1", "9" * 20)]

    def run(number: int) -> "subprocess.CompletedProcess[str]":
        name, value = choices[number]
        given = {"ACCEL_TRAIN_ROOT": str(root), "SLURM_GPUS_ON_NODE": "1", name: value}
        return job(script, tmp_path / str(number), root, REAL_TASKS, **given)

    with ThreadPoolExecutor(4) as pool:
        for (name, value), done in zip(choices, pool.map(run, range(len(choices))), strict=True):
            for word in ("unbound", "syntax error", "value too great", "ambiguous"):
                assert word not in done.stderr, (name, value, done.stderr)
            if value and done.returncode == 2:
                assert done.stderr.count("\n") == 1 and "error: " in done.stderr, (name, value, done.stderr)
            else:
                assert done.returncode == 3, (name, value, done.stderr)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_scripts_are_clean() -> None:
    scripts = [
        *ROOT.glob("slurm/*.s*"),
        *ROOT.glob("slurm/sites/*.sh"),
        *ROOT.glob("pbs/*"),
        *ROOT.glob("tests/cluster/*.sh"),
    ]
    assert len(scripts) >= 9
    done = subprocess.run(
        ["shellcheck", "-x", "--exclude=SC1091", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
