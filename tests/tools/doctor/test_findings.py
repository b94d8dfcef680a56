"""How the checks of the doctor judge a node, a job and a disk; where it is possible, the fault is really made."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from accelerate import Accelerator

from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.launch.environment import Launch
from accel_train.tools.doctor import job, node, storage
from accel_train.tools.doctor.check import FAIL, NA, PASS, WARN, Examination, Finding

Exam = Callable[..., Examination]


@pytest.fixture
def exam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Exam]:
    """Returns the examination of a recipe with these options, on one process and without a batch system."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "PBS_", "ACCEL_TRAIN_"))]:
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def examination(*options: str, folder: Path = tmp_path) -> Examination:
        examined = Examination(parse(["digits", *options]), Launch("srun", 0, 1, 0, 1), Accelerator(cpu=True))
        examined.folder = folder
        return examined

    yield examination
    torch.set_num_threads(threads)
    helpers.forget_accelerate()


def has(finding: Finding, status: str, measured: str, advice: str = "") -> bool:
    assert finding.status == status and measured in finding.measured and advice in finding.advice, finding
    return True


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_cores_that_a_task_did_not_get(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a launcher, which is the one task of its node."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4096")
    found = node.cores(exam())
    assert has(found, WARN, "for each process", "--cpu-bind=none") and found.expected.startswith("4096 a task")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert node.cores(exam()).status == PASS


def test_more_threads_or_workers_than_cores(exam: Exam) -> None:
    assert has(node.cores(exam("--data.workers", "4096")), WARN, "4096 workers", "--data.workers ")
    torch.set_num_threads(1000)  # as OMP_NUM_THREADS=1000 does
    assert has(node.cores(exam()), WARN, "1000 threads", "Unset OMP_NUM_THREADS")


def test_limits_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert node.cpu_quota(tmp_path / "cpu.max") == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert node.cpu_quota(tmp_path / "cpu.max") is None is node.cpu_quota(tmp_path / "none")
    monkeypatch.setattr(node, "CGROUPS", tmp_path)
    monkeypatch.setattr(node, "OWN_CGROUP", tmp_path / "own")
    assert node.cgroup_limit() is None
    (tmp_path / "memory.max").write_text("8589934592\n")  # of a container
    assert node.cgroup_limit() == 8 * 2**30
    group, step = tmp_path / "system.slice" / "job_7", tmp_path / "system.slice" / "job_7" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (group / "memory.max").write_text("1073741824\n")  # Slurm limits the job, and not its steps
    (tmp_path / "own").write_text("0::/system.slice/job_7/step_0\n")
    assert node.cgroup_limit() == 2**30
    old = tmp_path / "memory" / "slurm" / "job_7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("536870912\n")
    (tmp_path / "own").write_text("4:cpu:/\n3:memory,hugetlb:/slurm/job_7\n0::/\n")  # version 1 beside version 2
    assert node.cgroup_limit() == 2**29
    (tmp_path / "own").write_text("0::/../../elsewhere\n")  # outside of what a container sees
    assert node.cgroup_limit() == 8 * 2**30


def test_what_slurm_was_asked_for(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert node.memory_asked() is None
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    assert node.memory_asked() == 400 * 2**20
    assert has(node.memory(exam()), WARN, "0.4 GiB a process", "--mem-per-cpu")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of the node's
    assert node.memory_asked() is None


def test_a_control_group_below_what_was_asked_for(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real one, of version 1 or 2."""
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "8192")
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"accel-train-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(3 * 2**30))
        except OSError:
            continue
        sleeper = subprocess.Popen(["sleep", "100"])
        try:
            (group / "cgroup.procs").write_text(str(sleeper.pid))
            monkeypatch.setattr(node, "OWN_CGROUP", Path(f"/proc/{sleeper.pid}/cgroup"))
            found = node.memory(exam())
        finally:
            sleeper.kill()
            sleeper.wait()
            group.rmdir()
        assert has(found, WARN, "the control group allows 3.0 GiB a node") and found.expected == "8.0 GiB (--mem)"
        return
    pytest.skip("no control group can be made here")


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        (("0", "No"), PASS, "1 GPU"),
        (("2", "No"), FAIL, "uncorrected memory errors (2)"),
        (("0", "Yes"), FAIL, "wait to be remapped"),
    ],
)
def test_what_the_driver_says_is_judged(values: tuple[str, ...], status: str, words: str) -> None:
    assert has(node.judged_health(f"{', '.join(values)}\n"), status, words)


def test_gpus_that_are_given_but_not_used(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    examined: Any = exam()
    assert node.gpu_health(examined).status == NA
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert has(node.gpu_health(examined), FAIL, "the CPU is used", "torch.cuda.is_available")
    examined.accelerator = SimpleNamespace(device=torch.device("cuda"))
    assert has(node.gpu_health(examined), WARN, "1 of 4 GPUs are used", "Start 4 processes")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * 2**30, 80 * 2**30))
    assert has(node.gpu_health(examined), WARN, "10.0 of 80.0 GiB of cuda are used by other programs", "nvidia-smi")


def test_the_bus_is_judged_by_its_links() -> None:
    def status(bus: float, device: str, hosts: int = 2, *, infiniband: bool = False) -> str:
        return node.judged_bus("", bus, device, hosts=hosts, infiniband=infiniband).status

    # two healthy nodes with CPUs and gigabit Ethernet, one that is slow, and GPUs on such a network
    assert [status(0.11e9, "cpu"), status(0.01e9, "cpu"), status(0.11e9, "cuda")] == [PASS, WARN, WARN]
    assert [status(2e9, "cuda"), status(2e9, "cuda", infiniband=True)] == [PASS, WARN]
    assert status(1e6, "cuda", 1) == PASS  # within a host


def test_a_proxy_that_does_not_answer(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in job.PROXIES:
        monkeypatch.delenv(name, raising=False)
    assert job.variables(exam()).status == PASS
    port = helpers.free_port()
    monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{port}/")
    found = job.variables(exam())
    assert has(found, WARN, f"https_proxy is 127.0.0.1:{port}, which does not answer", "Unset https_proxy")
    assert "secret" not in str(found)


def test_the_rest_of_the_jobs_time(exam: Exam, monkeypatch: pytest.MonkeyPatch) -> None:
    in_an_hour, examined = int(time.time()) + 3600, exam()
    monkeypatch.setenv("ACCEL_TRAIN_JOB_TIMES", f"{in_an_hour - 60} {in_an_hour}")  # of pbs/train.pbs
    assert job.end_of_job() == in_an_hour and job.time_left(examined).status == NA
    examined.measured["training_seconds"] = 1800
    assert job.time_left(examined).status == PASS
    examined.measured["training_seconds"] = 3 * 3600
    assert has(job.time_left(examined), WARN, "1.00 h left", "3 requeues")
    monkeypatch.setenv("ACCEL_TRAIN_JOB_TIMES", "")  # no walltime
    assert job.end_of_job() is None and job.time_left(examined).status == NA
    monkeypatch.setenv("SLURM_JOB_END_TIME", "200")
    assert job.end_of_job() == 200


def test_a_finished_run(exam: Exam, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", "digits", "--epochs", "1", "--output-dir", str(run)]) == 0
    options = ("--output-dir", str(run), "--epochs")
    assert has(job.time_left(exam(*options, "1")), WARN, "holds a finished run", "with --resume to go on")
    assert has(job.time_left(exam(*options, "1", "--optim.lr", "7")), FAIL, "optim.lr", "this message")


@pytest.mark.parametrize(
    ("option", "save", "status", "words"),
    [
        ("", 1.0, WARN, "no --signal"),
        ("USR1@60", None, NA, "not measured"),
        ("USR1@60", 29.0, PASS, "a save takes 29 s"),
        ("SIGUSR1@60", 29.0, PASS, "USR1@60"),
        ("10", 31.0, FAIL, "a save takes 31 s"),
        ("R:USR1@600", 31.0, PASS, "USR1@600"),
        ("HUP@120", 1.0, WARN, "saves, but the job is not requeued"),
        ("TERM@600", 31.0, WARN, "saves, but the job is not requeued"),
        ("B:USR1@600", 1.0, FAIL, "only the batch script"),
        ("RB:USR1@600", 1.0, FAIL, "only the batch script"),
        ("USR2@600", 1.0, FAIL, "does not listen"),
    ],
)
@pytest.mark.usefixtures("exam")
def test_a_signal_that_comes_too_late_or_not_to_the_training(
    option: str, save: float | None, status: str, words: str
) -> None:
    finding = job.judged_signal(option, save)
    assert has(finding, status, words)
    if status in (WARN, FAIL):
        again = finding.advice.removeprefix("sbatch --signal=")
        assert job.judged_signal(again, save).status == PASS  # the advice helps


@pytest.mark.usefixtures("exam")
def test_the_job_scripts_pass_on_a_signal_that_only_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_START", "/runs/digits/job-7/slurm/start-7.0")
    verdicts = {given: job.judged_signal(given, 10.0).status for given in ("B:USR1@60", "RB:10@60", "B:TERM@60", "")}
    assert verdicts == {"B:USR1@60": PASS, "RB:10@60": PASS, "B:TERM@60": FAIL, "": WARN}
    assert has(job.judged_signal("B:USR1@60", 40.0), FAIL, "a save takes 40 s", "--signal=B:USR1@161")
    monkeypatch.delenv("ACCEL_TRAIN_START")
    assert job.judged_signal("B:USR1@60", 10.0).status == FAIL  # a script of the user's own


@pytest.mark.usefixtures("exam")
def test_the_signal_of_the_command_line_counts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then SBATCH_SIGNAL, then the script: as sbatch has it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    script = "echo '#!/bin/bash'; echo '#SBATCH --signal=USR1@90  # seconds'"
    program(tmp_path, "scontrol", f"[ $1 = show ] || {{ {script}; }}")
    assert job.signal_option() == "USR1@90"
    program(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert job.signal_option() == "USR1@90"
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@30")
    assert job.signal_option() == "USR1@30"
    line = "sbatch --nodes=2 --signal=B:USR1@60 slurm/train.sbatch r --signal=X@1"
    program(tmp_path, "sacct", f"echo '{line}'")
    assert job.signal_option() == "B:USR1@60"
    program(tmp_path, "sacct", "exit 1")
    program(tmp_path, "scontrol", f"echo JobId=7 Requeue=1 SubmitLine='{line}'")  # since Slurm 24.05
    assert job.signal_option() == "B:USR1@60"


def test_a_job_that_may_not_be_requeued_or_saves_too_late(
    exam: Exam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    examined = exam()
    examined.measured["save_seconds"] = 2.0
    assert job.signal_of_job(examined).status == NA
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@120")
    program(tmp_path, "scontrol", "echo JobId=7 Requeue=1")
    assert job.signal_of_job(examined).status == PASS
    with monkeypatch.context() as deadly:
        deadly.setattr(job, "_signal_path", lambda _: Finding(FAIL, "SIGUSR1 ends the launcher"))
        assert has(job.signal_of_job(examined), FAIL, "ends the launcher")
        deadly.delenv("SBATCH_SIGNAL")
        assert has(job.signal_of_job(examined), WARN, "no --signal")  # nor would the launcher get one
    program(tmp_path, "scontrol", "echo JobId=7 Requeue=0")
    assert has(job.signal_of_job(examined), WARN, "may not be requeued", "--requeue")
    monkeypatch.setenv("ACCEL_TRAIN_LEAD_SECONDS", "120")  # of pbs/train.pbs
    assert job.signal_of_job(examined).status == PASS
    examined.measured["save_seconds"] = 100.0
    assert has(job.signal_of_job(examined), FAIL, "a save takes 1e+02 s", "LEAD_SECONDS=401")


@pytest.mark.parametrize(("trap", "status"), [("", FAIL), ('trap "" USR1;', PASS)])
def test_a_launcher_that_the_signal_would_end(
    trap: str, status: str, exam: Exam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged by a real process, which nobody signals."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(job, "launcher_command", lambda: ["torchrun"])
    launcher = subprocess.Popen(["sh", "-c", f"{trap} exec sleep 100"], stdout=subprocess.PIPE)
    try:
        monkeypatch.setattr(job, "parent_process", lambda: (SimpleNamespace(pid=launcher.pid), []))
        deadline, found = time.monotonic() + 10, job._signal_path(exam())
        while found.status != status and time.monotonic() < deadline:  # until the shell has done it
            time.sleep(0.05)
            found = job._signal_path(exam())
    finally:
        launcher.kill()
        launcher.wait()
    assert found.status == status and ("trap" in found.advice) == (status == FAIL)


def test_a_disk_without_room(exam: Exam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "checkpoint_bytes", lambda _: 2**20)
    with helpers.small_disk(tmp_path / "disk", "200k") as disk:
        examined = exam(folder=disk)
        found = storage.room(examined)
        assert has(found, FAIL, "GiB free", "--checkpoint.keep") and "4 checkpoints of 1.0 MiB" in found.expected
        assert has(storage.save(examined), FAIL, "No space left") and not examined.measured
        assert list(disk.iterdir()) == []


def test_a_quota_of_files(exam: Exam, tmp_path: Path) -> None:
    with helpers.small_disk(tmp_path / "disk", "64m,nr_inodes=20") as disk:
        assert has(storage.room(exam(folder=disk)), FAIL, "inodes free", "Delete files")


@pytest.mark.parametrize("name", ["HOME", "TMPDIR", "HF_HOME"])
def test_a_folder_for_scratch_that_is_full_or_absent(
    name: str, exam: Exam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HOME", "TMPDIR", *storage.CACHES):
        monkeypatch.delenv(other, raising=False)
    assert storage.room(exam()).status in (PASS, NA)
    with helpers.small_disk(tmp_path / "disk", "2m") as disk:
        monkeypatch.setenv(name, str(disk))
        assert has(storage._scratch(exam()), WARN, f"{name} is {disk}: No space left on device", f"export {name}=")
    monkeypatch.setenv(name, str(tmp_path / "none"))
    if name == "HF_HOME":  # it is made when it is needed
        assert storage._scratch(exam()).status == NA
    else:
        assert has(storage.room(exam()), WARN, "No such file or directory")


def test_a_disk_that_refuses_the_room_it_shows(exam: Exam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quota: the file system is large and almost empty, and this user gets nothing."""
    with helpers.small_disk(tmp_path / "disk", "20m") as disk:
        usage = storage.shutil.disk_usage(disk)._replace(total=2**40, used=0, free=2**40)
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(storage, "ASKED_SECONDS", 60.0)  # on a busy machine the first question may take longer
        monkeypatch.setattr(storage, "checkpoint_bytes", lambda _: 8 * 2**20)
        assert has(storage.room(exam(folder=disk)), FAIL, "No space left on device", "quota")
        monkeypatch.setattr(storage, "checkpoint_bytes", lambda _: 2**20)
        assert storage.room(exam(folder=disk)).status == PASS
        assert list(disk.iterdir()) == []
