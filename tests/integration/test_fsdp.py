"""FSDP2 in the whole program: the same run as under DDP, and checkpoints that both can resume."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import helpers
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from accel_train.checkpoint.directory import find_newest_checkpoint
from accel_train.launch.accelerator import LAUNCHER_CONFIG as VARIABLE

# A transformer of timm's with two blocks, SGD with momentum, clipping and a running mean: all that sees the parameters;
# stochastic depth, which whatever computes activations anew must draw again.
RUN = """
    digits --model.name test_vit --model.image-size 32 --model.drop-path 0.3 --data.name synthetic
    --data.train-limit 192 --data.test-limit 64 --batch-size 16 --virtual-batch-size 8
    --optim.clip 1 --ema.enabled true --ema.decay 0.8
    --epochs 1 --log-every-updates 1
"""
# Small enough that each of the model's parts is split by itself; float32, to be compared.
FSDP = {"fsdp_min_num_params": "20000", "mixed_precision": "no"}
BF16 = {"mixed_precision": "bf16"}


def fsdp(run: Path, *words: str, launch: Mapping[str, str] = FSDP, settings: str = RUN, launcher: bool = False) -> str:
    """Train under accelerate_configs/fsdp2.yaml with the options `launch`; the launcher's variables are its own only if
    it is started (tests/launch/test_launcher_config.py compares them)."""
    config, options = helpers.ROOT / "accelerate_configs" / "fsdp2.yaml", FSDP | launch  # type: ignore[operator]
    line = [helpers.ROOT / "tests" / "fsdp_worker.py", *settings.split(), *words, "--output-dir", run]
    if launcher:
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, *flags, *line]
        done = subprocess.run([*map(str, start)], env=helpers.environment(), capture_output=True, text=True)
    else:
        found = yaml.safe_load(config.read_text())
        for name, value in options.items():
            (found["fsdp_config"] if name.startswith("fsdp_") else found)[name] = value
        file = run.with_name(f"{run.name}.yaml")
        file.write_text(yaml.safe_dump(found))
        done = helpers.python(*line, processes=2, **{VARIABLE: str(file)})  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ddp(run: Path, settings: str = RUN) -> None:
    done = helpers.run(*settings.split(), "--output-dir", run, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(run: Path) -> dict[int, float]:
    return {line["update"]: line["loss"] for line in helpers.lines_of(run, "train")}


# A model that needs a forward pass for each virtual batch. The last update has 11 samples of 16, so one of its four
# passes has no sample: all processes make it, because each waits for the others' parameters.
COUPLED = f"""
    digits --model.name {helpers.ROOT / "tests/odd_models.py"}:TwoViews --data.train-limit 75 --data.test-limit 30
    --data.val-fraction 0 --batch-size 16 --virtual-batch-size 4 --epochs 1 --data.workers 0 --log-every-updates 1
    --optim.lr 0.01
"""


@pytest.mark.ci
def test_fsdp2_trains_a_model_that_couples_samples_as_one_process_does(tmp_path: Path) -> None:
    done = helpers.run(*COUPLED.split(), "--output-dir", tmp_path / "one")
    assert done.returncode == 0 and "one pass over two virtual batches" in done.stderr, done.stdout + done.stderr
    fsdp(tmp_path / "two", settings=COUPLED, launch={"fsdp_min_num_params": "100"})
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(found) == list(expected) == [1, 2, 3, 4, 5]
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    weights = load_file(tmp_path / "two" / "model.safetensors")
    for key, array in load_file(tmp_path / "one" / "model.safetensors").items():
        np.testing.assert_allclose(weights[key], array, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fsdp2_then_ddp_then_fsdp2_make_the_run_that_ddp_makes(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    ddp(one)
    other.mkdir()
    (other / "STOP").touch()
    told = fsdp(other, "--model.gradient-checkpointing", "true")
    assert int(re.search(r"sharded (\d+), 0 anew", told)[1]) > 10  # type: ignore[index]
    (other / "STOP").touch()
    ddp(other)
    told = fsdp(other, launch={"fsdp_activation_checkpointing": "true"})
    assert "continuing after update 4" in told
    assert int(re.search(r"(\d+) anew", told)[1]) > 10  # type: ignore[index]
    expected, found = losses(one), losses(other)
    assert list(found) == list(expected) == list(range(1, 13))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
    for name in ("model.safetensors", "ema.safetensors"):
        weights = load_file(other / name)
        for key, array in load_file(one / name).items():
            np.testing.assert_allclose(weights[key], array, rtol=1e-4, atol=1e-6)


# With BatchNorm, whose statistics FSDP2 leaves in float32 when it casts the weights.
NORMS = RUN.replace("test_vit", "test_resnet").replace("192", "96")


@pytest.mark.slow
def test_batchnorm_in_bf16_is_that_of_ddp_and_goes_on_there(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    def ddp_in_bf16(run: Path) -> None:
        words = [*NORMS.split(), "--output-dir", str(run)]
        done = helpers.run(*words, processes=2, ACCELERATE_MIXED_PRECISION="bf16")
        assert done.returncode == 0, done.stdout + done.stderr

    ddp_in_bf16(one)
    for checkpointing in ("false", "true"):
        other.mkdir(exist_ok=True)
        (other / "STOP").touch()
        told = fsdp(other, "--model.gradient-checkpointing", checkpointing, launch=BF16, settings=NORMS, launcher=True)
        assert int(re.search(r"sharded (\d+)", told)[1]) > 10  # type: ignore[index]
    saved = find_newest_checkpoint(other)
    for name in ("model.safetensors", "ema.safetensors"):
        assert {str(array.dtype) for array in load_file(saved / name).values()} == {"float32", "int64"}
    ddp_in_bf16(other)
    expected, found = losses(one), losses(other)
    assert list(found) == list(expected) == list(range(1, 7))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.02)
