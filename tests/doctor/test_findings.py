"""How the checks of `accel-train doctor` judge what they have measured."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from accel_train.config.options import parse
from accel_train.doctor import check, data, memory, network, recipe, scheduler, storage
from accel_train.doctor.check import FAIL, NOT_CHECKED, PASS, WARN
from accel_train.doctor.devices import QUERY, computes_bf16, judged_health
from accel_train.launch.environment import Launch
from accel_train.models import create_model


def test_a_disk_without_room(tmp_path: Path) -> None:
    with helpers.small_disk(tmp_path / "disk", "200k") as disk:
        exam: Any = SimpleNamespace(
            folder=disk, config=parse(["digits"]), measured={"checkpoint_bytes": 1e6}, quick=False
        )
        room = storage._room(exam)
        assert (
            room.status == FAIL and "4 checkpoints of 1.0 MiB" in room.expected and "--checkpoint.keep" in room.advice
        )
        finding, seconds = storage._save(exam)
        assert finding.status == FAIL and seconds is None and "No space left" in finding.measured
        assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        (("0", "No", "Not Active"), PASS, "1 GPU"),
        (("2", "No", "Not Active"), FAIL, "uncorrected memory errors (2)"),
        (("0", "Yes", "Not Active"), FAIL, "wait to be remapped"),
        (("0", "No", "Active"), WARN, "slows down"),
        (("[N/A]", "[N/A]", "[N/A]"), NOT_CHECKED, "nothing"),
    ],
)
def test_what_the_driver_says_is_judged(values: tuple[str, ...], status: str, words: str) -> None:
    finding = judged_health(f"{', '.join(QUERY)}\n{', '.join(values)}\n")
    assert (finding.status, words in finding.measured) == (status, True), finding


def test_the_rest_of_the_jobs_time() -> None:
    in_an_hour = time.time() + 3600
    assert scheduler.judged_time(None, 10).status == NOT_CHECKED
    assert scheduler.judged_time(in_an_hour, None).status == NOT_CHECKED
    assert scheduler.judged_time(in_an_hour, 1800).status == PASS
    short = scheduler.judged_time(in_an_hour, 3 * 3600)
    assert short.status == WARN and "3 requeues" in short.advice


def test_the_times_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    assert scheduler.job_times() == (None, None)
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho JobId=7 StartTime=2026-01-02T03:04:05 EndTime=2026-01-02T05:04:05 Requeue=1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    began, ends = scheduler.job_times()
    assert began is not None and ends is not None and ends - began == 7200
    monkeypatch.setenv("SLURM_JOB_START_TIME", "100")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "200")
    assert scheduler.job_times() == (100, 200)


@pytest.mark.parametrize(
    ("option", "save", "status", "words"),
    [
        ("", 1.0, NOT_CHECKED, "neither"),
        ("USR1@60", None, NOT_CHECKED, "not measured"),
        ("USR1@60", 29.0, PASS, "60 s, a save takes 29 s"),
        ("SIGUSR1@60", 29.0, PASS, "60 s"),
        ("10", 31.0, FAIL, "60 s, a save takes 31 s"),
        ("R:TERM@600", 31.0, PASS, "600 s"),
        ("B:USR1@600", 1.0, FAIL, "only the batch script"),
        ("RB:USR1@600", 1.0, FAIL, "only the batch script"),
        ("USR2@600", 1.0, FAIL, "does not listen"),
    ],
)
def test_a_signal_that_comes_too_late_or_not_to_the_training(
    option: str, save: float | None, status: str, words: str
) -> None:
    finding = scheduler.judged_lead(option, save)
    assert (finding.status, words in finding.measured) == (status, True), finding
    if status == FAIL:
        again = finding.advice.removeprefix("sbatch --signal=")
        assert scheduler.judged_lead(again, save).status == PASS  # the advice helps


def test_the_job_scripts_pass_on_a_signal_that_only_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TRAIN_START", "/runs/digits/job-7/slurm/start-7.0")
    verdicts = {given: scheduler.judged_lead(given, 10.0).status for given in ("B:USR1@60", "RB:10@60", "B:TERM@60")}
    assert verdicts == {"B:USR1@60": PASS, "RB:10@60": PASS, "B:TERM@60": FAIL}
    assert "a save takes 40 s" in scheduler.judged_lead("B:USR1@60", 40.0).measured
    monkeypatch.delenv("ACCEL_TRAIN_START")
    assert scheduler.judged_lead("B:USR1@60", 10.0).status == FAIL  # a script of the user's own


def test_the_signal_is_read_from_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho '#!/bin/bash'\necho '#SBATCH --signal=USR1@90  # seconds'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SBATCH_SIGNAL", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert scheduler.signal_option() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert scheduler.signal_option() == "USR1@90"
    accounts = tmp_path / "sacct"  # what was given on sbatch's line comes before what is in the script
    accounts.write_text(
        "#!/bin/sh\necho 'sbatch --nodes=2 --signal=B:USR1@60 slurm/multi_node.sbatch r --signal=X@1'\n"
    )
    accounts.chmod(0o755)
    assert scheduler.signal_option() == "B:USR1@60"
    accounts.write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    assert scheduler.signal_option() == "USR1@90"
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@30")
    assert scheduler.signal_option() == "USR1@30"


def exam_of(folder: Path, **measured: float) -> Any:
    accelerator = SimpleNamespace(is_main_process=True, num_processes=1)
    config = parse(["digits", "--output-dir", str(folder)])
    return SimpleNamespace(config=config, measured=measured, accelerator=accelerator, folder=folder, quick=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (check, storage):
        monkeypatch.setattr(module, "broadcast_from_main", lambda _, decide: decide())
    for name in ("SLURM_JOB_ID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SBATCH_SIGNAL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_the_limits_of_a_job_of_pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exam = exam_of(tmp_path, save_seconds=2.0, training_seconds=7200.0)
    assert {check.look(exam).status for check in scheduler.LIMITS} == {NOT_CHECKED}
    now = int(time.time())
    monkeypatch.setenv("ACCEL_TRAIN_LEAD_SECONDS", "120")
    monkeypatch.setenv("ACCEL_TRAIN_JOB_TIMES", f"{now - 60} {now + 3600}")
    assert [check.look(exam).status for check in scheduler.LIMITS] == [WARN, PASS, PASS]
    slow = scheduler.lead(exam_of(tmp_path, save_seconds=100.0))
    assert slow.status == FAIL and slow.advice.endswith("LEAD_SECONDS=401")
    monkeypatch.setenv("ACCEL_TRAIN_JOB_TIMES", "")  # no walltime
    assert scheduler.time_left(exam).status == NOT_CHECKED


@pytest.mark.usefixtures("alone")
def test_a_requeued_run_knows_its_rest_and_a_preflight_is_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.time())
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 600))
    exam = exam_of(tmp_path)
    assert scheduler.time_left(exam).status == NOT_CHECKED
    for rest, status in ((60.0, PASS), (6000.0, WARN), (None, NOT_CHECKED), ("much", NOT_CHECKED)):
        (tmp_path / "status.json").write_text(json.dumps({"eta_seconds": rest}))
        assert scheduler.time_left(exam).status == status
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@120")
    exam.measured.update(save_seconds=80.0, training_seconds=7200.0)
    monkeypatch.setenv("ACCEL_TRAIN_PREFLIGHT", "1")
    left, lead = scheduler.time_left(exam), scheduler.lead(exam)
    assert left.status == lead.status == NOT_CHECKED
    assert "2.00 h" in left.measured and "--signal=USR1@321" in lead.measured


@pytest.mark.usefixtures("alone")
def test_a_quick_save_has_the_size_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exam = exam_of(tmp_path)
    exam.splits = SimpleNamespace(image_size=8, classes=tuple("0123456789"), channels=1)
    assert storage.room(exam).expected.startswith("4 checkpoints of")
    real = sum(tensor.numel() * 4 for tensor in create_model(
        exam.config.model, num_classes=10, channels=1, image_size=8).state_dict().values())  # fmt: skip
    assert exam.measured["checkpoint_bytes"] >= 2 * real
    assert storage.save(exam).status == PASS and exam.measured["save_seconds"] > 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_SIGNAL", "USR1@120")
    assert scheduler.lead(exam).status == PASS


def test_limits_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert scheduler.cpu_quota(tmp_path / "cpu.max") == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert scheduler.cpu_quota(tmp_path / "cpu.max") is None is scheduler.cpu_quota(tmp_path / "none")


def test_the_memory_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert memory.memory_limit() is None
    (tmp_path / "memory.max").write_text("8589934592\n")  # of a container
    assert memory.memory_limit() == 8 * 2**30
    job, step = tmp_path / "system.slice" / "job_7", tmp_path / "system.slice" / "job_7" / "step_0"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    (job / "memory.max").write_text("1073741824\n")  # Slurm limits the job, and not its steps
    (tmp_path / "own").write_text("0::/system.slice/job_7/step_0\n")
    assert memory.memory_limit() == 2**30
    old = tmp_path / "memory" / "slurm" / "job_7"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("536870912\n")
    (tmp_path / "own").write_text("4:cpu:/\n3:memory,hugetlb:/slurm/job_7\n0::/\n")  # version 1 beside version 2
    assert memory.memory_limit() == 2**29
    (tmp_path / "own").write_text("0::/../../elsewhere\n")  # outside of what a container sees
    assert memory.memory_limit() == 8 * 2**30
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert memory.memory_limit() == 400 * 2**20
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all of the node's
    assert memory.memory_limit() == 400 * 2**20
    exam: Any = SimpleNamespace(
        launch=Launch("srun", 0, 1, 0, 1), hosts=["here"], gather=lambda value: [value], names=str
    )
    found = memory.memory(exam)
    assert found.status == WARN and "0.4 GiB a process" in found.measured and "--mem-per-cpu" in found.advice


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(""), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")])
def test_an_evaluation_that_does_not_fit(tmp_path: Path, error: RuntimeError) -> None:
    def transform(batch: object) -> None:
        raise error

    pipeline = SimpleNamespace(batches=[0], transform=transform, samples=1000)
    setup = SimpleNamespace(evaluations={"test": pipeline}, device=torch.device("cpu"), model=torch.nn.Identity())
    setup.evaluation_batch = 256
    exam = exam_of(tmp_path)
    exam.workload, exam.accelerator = SimpleNamespace(setup=setup), Accelerator()
    finding = recipe.evaluation(exam)
    assert (finding.status, finding.advice) == (FAIL, "--eval-batch-size 64")


def test_too_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch("srun", 0, 1, 0, 1)
    exam: Any = SimpleNamespace(launch=launch, hosts=["here"], gather=lambda value: [value], names=str)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4096")
    found = scheduler.cores(exam)
    assert found.status == FAIL and "4096" in found.expected and "--cpu-bind=none" in found.advice
    exam.launch = replace(launch, launcher="accelerate")
    assert scheduler.cores(exam).status == PASS


def test_gpus_that_are_given_but_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    launch = Launch("srun", 0, 1, 0, 1)
    exam: Any = SimpleNamespace(
        launch=launch, hosts=["here"], gather=lambda value: [value], names=str, accelerator=accelerator
    )
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert scheduler.gpus(exam).status == NOT_CHECKED
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    found = scheduler.gpus(exam)
    assert found.status == FAIL and "4 GPUs" in found.expected and "torch.cuda.is_available" in found.advice
    accelerator.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    found = scheduler.gpus(exam)
    assert found.status == WARN and found.measured == "1 of 4 GPUs are used" and "Start 4 processes" in found.advice
    exam.hosts = ["here"] * 4
    assert scheduler.gpus(exam).status == PASS


SOCKETS = """node1:71:90 [0] NCCL INFO NET/IB : No device found.
node1:71:90 [0] NCCL INFO Using network Socket
node1:71:90 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node1:71:90 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
INFINIBAND = """node1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:71:90 [0] NCCL INFO Using network IB
node1:71:90 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""


@pytest.mark.parametrize(
    ("log", "has_infiniband", "status", "words"),
    [
        (SOCKETS, True, FAIL, "network Socket, NET/Socket/0, P2P/CUMEM/read"),
        (SOCKETS, False, PASS, "network Socket"),
        (INFINIBAND, True, PASS, "network IB, NET/IB/0/GDRDMA"),
        ("", True, NOT_CHECKED, "nothing"),
    ],
)
def test_what_nccl_has_chosen(log: str, has_infiniband: bool, status: str, words: str) -> None:
    finding = network.transport_of(log, has_infiniband)
    assert (finding.status, words in finding.measured) == (status, True), finding


def test_the_bus_within_a_host_is_judged_by_its_gpus() -> None:
    assert network.judged_bus("", 1e9, "").status == PASS  # nothing is known of it
    # two healthy nodes with CPUs and gigabit Ethernet, one that is slow, and GPUs on such a network
    speeds = ((0.11e9, "cpu", PASS), (0.01e9, "cpu", WARN), (0.11e9, "cuda", WARN), (1e9, "cuda", PASS))
    for speed, device, status in speeds:
        assert network.judged_network("", speed, device).status == status
    assert network.judged_bus("", 1e9, "NVIDIA A100-PCIE-40GB".replace("PCIE", "PCIe")).status == PASS
    statuses = [network.judged_bus("", speed, "NVIDIA H100 80GB HBM3").status for speed in (450e9, 300e9, 100e9)]
    assert statuses == [PASS, WARN, FAIL]
    # 1 GiB over 8 ranks in 4 ms: 7/4 of it goes through each link (nccl-tests, PERFORMANCE.md)
    assert network.bus_bandwidth(2**30, 0.004, 8) == pytest.approx(2**30 * 1.75 / 0.004)


def test_the_speed_of_infiniband_is_that_of_its_cards(tmp_path: Path) -> None:
    for card, rate, state in (
        ("mlx5_0", "400", "4: ACTIVE"),
        ("mlx5_1", "200", "4: ACTIVE"),
        ("mlx5_2", "400", "1: DOWN"),
    ):
        (tmp_path / card / "ports" / "1").mkdir(parents=True)
        (tmp_path / card / "ports" / "1" / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
        (tmp_path / card / "ports" / "1" / "state").write_text(f"{state}\n")
    assert network.infiniband_speed(8, tmp_path) == 60e9
    assert network.infiniband_speed(1, tmp_path) == 40e9  # one GPU a node uses one card
    assert network.infiniband_speed(8, tmp_path / "none") == 0


@given(st.integers(2, 33))
def test_each_pair_is_measured_once_and_each_round_at_the_same_time(count: int) -> None:
    ranks = list(range(0, 3 * count, 3))
    pairs = network._pairs(ranks)
    assert sorted(pairs) == list(itertools.combinations(ranks, 2))
    a_round = count // 2
    for start in range(0, len(pairs), a_round):
        together = [rank for pair in pairs[start : start + a_round] for rank in pair]
        assert len(set(together)) == len(together)  # nobody is in two pairs of a round


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with helpers.small_disk(tmp_path / "disk", "200k") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        exam: Any = SimpleNamespace(folder=disk, config=parse(["digits"]), measured={}, quick=False)
        finding, seconds = storage._save(exam)
        assert finding.status == FAIL and seconds is None and "Read-only file system" in finding.measured
        assert "--output-dir" in finding.advice


def test_a_disk_that_refuses_the_room_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quota: the file system is large and almost empty, and this user gets nothing."""
    with helpers.small_disk(tmp_path / "disk", "20m") as disk:
        usage = storage.shutil.disk_usage(disk)._replace(total=2**40, used=0, free=2**40)
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(storage, "ASKED_SECONDS", 60.0)  # on a busy machine the first question may take longer
        exam: Any = SimpleNamespace(folder=disk, config=parse(["digits"]), measured={"checkpoint_bytes": 8 * 2**20})
        finding = storage._room(exam)
        assert finding.status == FAIL and "No space left on device" in finding.measured and "quota" in finding.advice
        exam.measured["checkpoint_bytes"] = 2**20
        assert storage._room(exam).status == PASS
        assert list(disk.iterdir()) == []


def test_what_is_kept_for_root_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = storage.shutil.disk_usage(tmp_path)._replace(total=1000 * 2**30, used=400 * 2**30, free=120 * 2**30)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
    exam: Any = SimpleNamespace(folder=tmp_path, config=parse(["digits"]), measured={"checkpoint_bytes": 2**20})
    assert storage._room(exam).status == PASS and "77% full" in storage._room(exam).measured
    usage = usage._replace(used=500 * 2**30)
    assert storage._room(exam).status == WARN


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    with helpers.small_disk(tmp_path / "disk", "200k") as disk:
        assert data.file_system(disk / "below") == "tmpfs"
        assert data.file_system(tmp_path) != "tmpfs" or data.file_system(Path("/")) == "tmpfs"


def test_instructions_for_bfloat16_are_those_that_torch_finds() -> None:
    cpu = torch.backends.cpu.get_cpu_capability()
    if cpu != "AVX512":
        pytest.skip(f"torch says nothing of bfloat16 on {cpu}")
    assert computes_bf16(torch.device("cpu")) == torch.cpu._is_avx512_bf16_supported()
