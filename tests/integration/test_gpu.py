"""Tests that need a GPU: `pytest -m gpu` on a machine with CUDA; elsewhere they are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from PIL import Image

from accel_train.cli import main
from accel_train.config.schema import Augment
from accel_train.data import memory
from accel_train.data.batch_transform import BatchTransform
from accel_train.exact_sum import ExactGradients
from accel_train.keyed import hashed
from accel_train.models.batchnorm_kernels import ComposedBatchNorm, why_not_fused
from accel_train.records.meter import Stopwatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

AUGMENTED = """
digits --augment.crop random --augment.pad 1 --augment.flip 0.5 --augment.erase 0.2 --augment.mixup 0.2
--model.name resnet18_cifar --model.image-size 32 --optim.clip 1 --ema.enabled true
""".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset this process before each run, as if a new program started."""
    yield
    helpers.forget_accelerate()


def result(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    assert main(["train", "digits", "--output-dir", str(tmp_path / "run")]) == 0
    assert result(tmp_path / "run")["test_accuracy"] > 0.97


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_policies_and_optimizers_on_one_bad_sample(tmp_path: Path, policy: str, optimizer: str) -> None:
    """39 black images and a white one, which this `std` makes larger than a float32 can be."""
    for split, count in (("train", 40), ("test", 4)):
        for number in range(count):
            path = tmp_path / "images" / split / "ab"[number % 2] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (255 * ((split, number) == ("train", 17)),) * 3).save(path)
    words = ["--data.name", "folder", "--data.root", str(tmp_path / "images"), "--data.workers", "1", "--epochs", "1"]
    words += ["--model.name", "test_resnet", "--model.image-size", "32", "--augment.resize", "32", "--batch-size", "8"]
    words += ["--augment.crop", "center", "--augment.mean", "0", "0", "0", "--augment.std", *["1e-39"] * 3]
    words += ["--optim.name", optimizer, "--on-nonfinite", policy, "--output-dir", str(tmp_path / "run")]
    assert main(["train", "digits", *words]) == (2 if policy == "stop" else 0)
    if policy != "stop":
        assert result(tmp_path / "run")["skipped_updates"] == 1


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_first_step_that_overflows_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    words = ["--epochs", "1", "--augment.mean", "0", "--augment.std", "0.001", "--optim.name", optimizer]
    words += ["--optim.lr", "1e-9", "--checkpoint.every-updates", "1", "--checkpoint.keep", "99"]
    assert main(["train", "digits", *words, "--output-dir", str(tmp_path / "run")]) == 0
    first = tmp_path / "run" / "checkpoints" / "update-00000001"
    assert json.loads((first / "state.json").read_text())["scaler"]["scale"] < 65536
    state = torch.load(first / "optimizer.pt", weights_only=True)["state"]
    assert all(torch.isfinite(value).all() for each in state.values() for value in each.values())


@pytest.mark.parametrize(
    ("mode", "micro_batch", "code"),
    [("default", "48", 0), ("default", "24", 0), ("reduce-overhead", "48", 0), ("reduce-overhead", "24", 2)],
)
def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, micro_batch: str, code: int) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", mode)
    words = ["--micro-batch-size", micro_batch, "--output-dir", str(tmp_path / "run")]
    assert main(["train", "digits", *words]) == code
    assert code or result(tmp_path / "run")["test_accuracy"] > 0.97


def test_evaluate_predict_and_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    image = tmp_path / "image.png"
    Image.new("L", (8, 8)).save(image)
    figures = str(tmp_path / "figures.json")
    for words in (
        ["train", "digits", "--epochs", "2", "--ema.enabled", "true", "--output-dir", str(run)],
        ["evaluate", str(run)],
        ["predict", str(run), str(image)],
        ["bench", "digits", "--rounds", "1", "--updates", "20", "--output", figures],
    ):
        assert main(words) == 0, words
        helpers.forget_accelerate()
    evaluated = json.loads((run / "evaluation-test.json").read_text())
    assert evaluated["model"]["accuracy"] == result(run)["test_accuracy"]
    assert "image.png" in capsys.readouterr().out


def test_too_large_a_micro_batch_names_a_smaller_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a device that is made small."""
    words = ["digits", "--data.name", "synthetic", "--model.image-size", "224", "--model.name", "resnet50"]
    words += ["--data.train-limit", "2048", "--data.test-limit", "64", "--batch-size", "1024", "--epochs", "1"]
    words += ["--augment.crop", "center", "--augment.pad", "0", "--optim.name", "adamw"]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((8 << 30) / total)
    try:
        assert main(["train", *words, "--output-dir", str(tmp_path / "run")]) == 2
        assert "give --micro-batch-size" in capsys.readouterr().err
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def launched(config: str, *words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{config}"]
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"}
    line = [*launcher, *words]
    return subprocess.run(line, cwd=helpers.ROOT, env=environment, capture_output=True, text=True, timeout=280)


def test_two_processes_share_the_gpu(tmp_path: Path) -> None:
    words = ["-m", "accel_train.train", "digits", "--output-dir", str(tmp_path / "run")]
    refused = launched("multi_gpu.yaml", "--num_processes", "2", *words)
    assert refused.returncode != 0 and "share one GPU" in refused.stderr, refused.stderr
    done = launched("multi_gpu.yaml", "--num_processes", "2", *words, "--share-gpus", "true")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["test_accuracy"] > 0.97


def test_fsdp2_with_batchnorm_in_bf16_goes_on_without_it(tmp_path: Path) -> None:
    """With one process, as far as one GPU goes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    words = ["-m", "accel_train.train", "digits", "--model.name", "resnet18_cifar", "--model.image-size", "32"]
    words += ["--epochs", "1", "--optim.clip", "1", "--ema.enabled", "true", "--output-dir", str(tmp_path / "run")]
    done = launched("fsdp2.yaml", "--num_processes", "1", *words)
    assert done.returncode == 0, done.stderr
    done = launched("single_gpu.yaml", *words)
    assert done.returncode == 0 and "continuing after update" in done.stdout, done.stdout + done.stderr
    assert result(tmp_path / "run")["updates"] == 30


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_cropped_flipped_and_normalised_pixels_are_bitwise_those_of_the_cpu(layout: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, 3, 32, 32), generator=generator, dtype=torch.uint8)
    batch = {"images": images.contiguous(memory_format=layout), "labels": torch.zeros(300, dtype=torch.int64)}
    batch |= {"keys": hashed(7, torch.arange(300)), "weights": torch.ones(300)}
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        transform = BatchTransform(
            Augment(crop="random", pad=4, flip=0.5),
            size=32,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            num_classes=10,
            training=True,
            per_image=False,
            device=device,
            memory_format=layout,
        )
        assert transform.draw_parameters is not None
        whole = batch | {"parameters": transform.draw_parameters(batch["keys"], batch["weights"])}
        found.append(transform({name: values.to(device) for name, values in whole.items()})[0].cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_the_host_never_waits_for_the_device_between_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """From the 10th to the 60th update any call that makes the host wait raises."""
    timed = Stopwatch.timed
    guarded = 0

    def guard(self: Stopwatch, batches: Iterable[Any]) -> Iterator[Any]:
        nonlocal guarded
        for update, batch in enumerate(timed(self, batches)):
            torch.cuda.set_sync_debug_mode("error" if 10 <= update < 60 else "default")
            guarded += 10 <= update < 60
            yield batch
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Stopwatch, "timed", guard)
    if placement == "host":
        monkeypatch.setattr(memory, "free_device_bytes", lambda device: 0)
    words = ["--batch-size", "16", "--epochs", "1", "--log-every-updates", "1000"]
    try:
        assert main(["train", *AUGMENTED, *words, "--output-dir", str(tmp_path / "run")]) == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guarded == 50


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Not bitwise: convolutions on a GPU may add in any order."""
    words = ["train", "digits", "--schedule.name", "constant", "--optim.lr", "0.02"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, epochs in ((whole, 6), (parts, 3), (parts, 6)):
        (run / "result.json").unlink(missing_ok=True)  # finished, it would stay as it is
        assert main([*words, "--epochs", str(epochs), "--output-dir", str(run)]) == 0
        helpers.forget_accelerate()
    assert result(parts)["updates"] == result(whole)["updates"] == 180
    assert result(parts)["test_loss"] == pytest.approx(result(whole)["test_loss"], rel=0.1)


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
def test_exact_sums_have_the_bits_of_a_cpus(bad: float | None) -> None:
    """Every step is either exact or rounds as IEEE 754 says, and both devices find a NaN."""
    sums = []
    for device in ("cpu", "cuda"):
        numbers = torch.Generator().manual_seed(0)
        shapes = [(1100, 1000), (64, 16, 3, 3), (64,), (7,)]
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        exact = ExactGradients(parameters, 16)
        for number in range(12):
            for parameter in parameters[: 4 if number % 2 else 3]:
                gradient = torch.randn(parameter.shape, generator=numbers) * 10.0 ** -(number * 3 + 6)
                if bad is not None and number == 5 and len(parameter) == 7:
                    gradient[3] = bad
                parameter.grad = gradient.to(device)
            exact.add()
        exact.finish(3 * 12)
        sums.append([parameter.grad.cpu() for parameter in parameters if parameter.grad is not None])
    for on_cpu, on_gpu in zip(*sums, strict=True):
        assert torch.equal(on_cpu.nan_to_num(0).view(torch.int32), on_gpu.nan_to_num(0).view(torch.int32))
        assert bool(on_gpu.isnan().all()) == bool(on_cpu.isnan().all()) == (bad is not None and len(on_gpu) == 7)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_batchnorm_in_triton_is_batchnorm_in_torchs_operators(kind: torch.dtype) -> None:
    device = torch.device("cuda", 0)
    assert why_not_fused(device) == ""
    from accel_train.models.batchnorm_triton import Fused

    for channels, size in ((64, 32), (512, 4), (10, 1)):
        values = torch.randn(256, channels, size, size, device=device).to(kind)
        values = values.contiguous(memory_format=torch.channels_last).requires_grad_()
        weight, bias = torch.randn(2, channels, device=device).requires_grad_()
        statistics, gradient = torch.zeros(8, 2, channels, device=device), torch.randn_like(values)
        expected, *moments = ComposedBatchNorm.apply(values, 32, weight, bias, 1e-5)
        found = Fused.apply(values, 32, weight, bias, 1e-5, statistics)
        gradients = [torch.autograd.grad(each, (values, weight, bias), gradient) for each in (found, expected)]
        pairs = [(found, expected), *zip(statistics.unbind(1), moments, strict=True), *zip(*gradients, strict=True)]
        for one, other in pairs:
            apart = (one.double() - other.double()).norm() / other.double().norm()
            assert apart < (1e-4 if kind == torch.float32 else 1e-2), (channels, size)
