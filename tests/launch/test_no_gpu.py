"""A launcher that was asked for GPUs, on a machine without one."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest
import worlds

from accel_train.launch import process
from accel_train.launch.process import gpu_asked_for

CONFIGS = helpers.ROOT / "accelerate_configs"
SILENT = "distributed_type: 'NO'\nmixed_precision: bf16\n"


def launched(*words: object, **variables: str) -> tuple[int, str]:
    """The exit code and output of a real launcher whose processes see no GPU, even if there is one."""
    line = [str(worlds.BIN / "accelerate"), "launch", *map(str, words)]
    process = worlds.start(*line, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", **variables)
    codes, _, text = worlds.finish(process)
    return codes[0], text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "asked"),
    [
        ("single_gpu", 1, "gpu_ids: all"),
        ("multi_gpu", 2, "gpu_ids: all"),
        ("fsdp2", 2, "gpu_ids: all"),
    ],
)
def test_a_training_on_gpus_does_not_begin_on_the_cpu(tmp_path: Path, name: str, processes: int, asked: str) -> None:
    file, run = CONFIGS / f"{name}.yaml", tmp_path / "run"
    words = ["-m", "accel_train.train", "digits", "--epochs", "1", "--output-dir", run]
    code, err = launched("--config_file", file, "--num_processes", processes, "--main_process_port", "0", *words)
    lines = [line for line in err.splitlines() if "accel-train" in line and "error" in line]
    assert code != 0 and len(lines) == 1, err
    assert lines[0].startswith(f"accel-train: error: A GPU was asked for ({asked} in {file}), but torch ")
    assert "CUDA_VISIBLE_DEVICES is ''" in lines[0]
    config = "cpu" if processes == 1 else "multi_cpu"
    assert f"To train on the CPU: --config_file accelerate_configs/{config}.yaml." in lines[0]
    assert "exit status 2" in err or "exitcode  : 2" in err
    assert not run.exists()


@pytest.mark.slow
def test_what_asks_for_no_gpu_runs(tmp_path: Path) -> None:
    silent = tmp_path / "silent.yaml"
    silent.write_text(SILENT)
    single = CONFIGS / "single_gpu.yaml"
    for words, variables in (
        (["--config_file", silent], {}),
        (["--config_file", single, "--cpu"], {}),
        (["--config_file", CONFIGS / "multi_cpu.yaml"], {}),  # MULTI_GPU, because MULTI_CPU starts one process
        (["--config_file", single], {"ACCELERATE_USE_CPU": "true"}),  # the launcher sets it to False
    ):
        code, err = launched(*words, worlds.PROGRAM, **variables)
        assert code == 0, err


def test_which_launch_commands_ask_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "gpu": "distributed_type: 'NO'\ngpu_ids: all\n",
        "cpu": "distributed_type: 'NO'\ngpu_ids: all\nuse_cpu: true\n",
        "multi_cpu": "distributed_type: MULTI_CPU\nuse_cpu: true\n",
        "multi": "distributed_type: MULTI_XPU\ngpu_ids: 0,1\n",
        "several": "distributed_type: MULTI_GPU\n",
        "silent": SILENT,
        "damaged": "[",
        "json": '{"distributed_type": "MULTI_GPU", "gpu_ids": "all"}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    default = tmp_path / "default.yaml"
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(default))

    def asked(*words: str, launcher: str = "/bin/accelerate") -> str | None:
        line = [word if word not in files else str(tmp_path / word) for word in words]
        monkeypatch.setattr(process, "launcher_command", lambda: [launcher, "launch", *line, "script.py"])
        return gpu_asked_for(None)

    assert asked("--config_file", "gpu") == f"gpu_ids: all in {tmp_path / 'gpu'}"
    assert asked("--config_file", "multi") == f"gpu_ids: 0,1 in {tmp_path / 'multi'}"
    assert asked("--config_file", "json") == f"gpu_ids: all in {tmp_path / 'json'}"
    assert asked("--multi_gpu") is None
    assert asked("--gpu_ids=0,1") == "--gpu_ids=0,1"
    for name in ("cpu", "multi_cpu", "several", "silent", "damaged"):
        assert asked("--config_file", name) is None
    assert asked("--cpu", "--config_file", "gpu") is None
    assert asked() is None  # no default config
    default.write_text(files["gpu"])
    assert asked() == f"gpu_ids: all in {default}"
    assert asked(launcher="/bin/torchrun") is None
    monkeypatch.setattr(process, "launcher_command", list)
    assert gpu_asked_for(None) is None
    assert gpu_asked_for(str(tmp_path / "multi")) is not None  # a task of srun's, with ACCEL_TRAIN_LAUNCHER_CONFIG
