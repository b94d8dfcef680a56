"""`--bitwise true`: whole runs have the same weights, to the bit, on any number of processes.

test_restart.py kills such runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import pytest
from test_restart import lines
from torchvision.transforms.functional import to_pil_image

from accel_train.data.sources.arrays import Synthetic

ODD_MODELS = Path(__file__).parent.parent / "odd_models.py"
MADE = "--data.name synthetic --data.train-limit 88 --data.test-limit 24 --model.image-size 32 --data.val-fraction 0"
COMMON = "--bitwise true --log-every-updates 1 --data.workers 0"
RUNS = {
    "digits": "digits --epochs 1 --data.train-limit 500",
    "batchnorm": f"cifar10_resnet18 {MADE} --epochs 2 --batch-size 32 --virtual-batch-size 8 --model.name test_resnet "
    "--model.drop-path 0.2 --augment.mixup 0.4 --ema.enabled true --optim.clip 1 --augment.flip 0.5",
    # Eight virtual batches of 4, drawn with replacement; the last window of an epoch is short.
    "drawn": f"cifar10_resnet18 {MADE} --epochs 2 --batch-size 32 --virtual-batch-size 4 --model.name test_resnet "
    "--model.drop-path 0.2 --augment.mixup 0.4 --ema.enabled true --optim.clip 1 --data.sampler balanced",
    # A BatchNorm that is called twice, and layers that are never called.
    "odd": f"digits {MADE} --epochs 2 --batch-size 32 --virtual-batch-size 8 --model.name {ODD_MODELS}:SharedNorm",
}
SLOW = {
    "mnist_cnn": f"mnist_cnn {MADE} --model.image-size 28 --data.channels 1 --epochs 2 --batch-size 32",
    "resnet18_cifar": f"cifar10_resnet18_sota {MADE} --epochs 1 --batch-size 32 --virtual-batch-size 8",
    "vit": f"imagenet_vit_small {MADE} --epochs 2 --batch-size 32 --model.name vit_tiny_patch16_224 "
    "--virtual-batch-size 4 --model.image-size 32 --augment.resize 32 "
    "--model.drop-path 0.2 --model.dropout 0.1 --schedule.warmup-epochs 0",
    "folder": "cifar10_resnet18 --data.name folder --data.val-fraction 0.1 --epochs 1 --batch-size 32 "
    "--model.image-size 32 --augment.resize 36 --virtual-batch-size 8 "
    "--augment.policy randaugment --augment.mixup 0.2 --optim.name adamw --optim.lr 0.001",
}


def trained(run: Path, words: str, processes: int, **options: Any) -> None:
    done = helpers.run(
        *words.split(), *COMMON.split(), "--output-dir", run, processes=processes, timeout=280, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    others = re.sub(r"accel-train: warning: batch: .* of the slots are empty.*\s", "", done.stderr)
    assert options.get("launcher") or not others.strip()  # no warning of a library either


def photographs(folder: Path) -> Path:
    """JPEG files of several sizes in train/ and test/."""
    for split, count in (("train", 80), ("test", 16)):
        images = Synthetic(split, 0, count, 3, 64)
        for number in range(count):
            path = folder / split / "ab"[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = to_pil_image(images.fetch([number])[0])
            image.crop((0, 0, 40 + number % 25, 64 - number % 20)).save(path)
    return folder


def assert_same(one: Path, other: Path) -> None:
    """The weights, the EMA's, the lines of the log and the result, to the bit."""
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    for kind in ("train", "eval"):
        assert lines(one, kind) == lines(other, kind)
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    named = [name for name in results[0] if name.startswith(("test_", "ema_test_", "best_", "update"))]
    assert named
    assert [results[0][name] for name in named] == [results[1][name] for name in named]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "worlds"),
    [
        # Three share four virtual batches as 2, 1, 1, and eight as 3, 3, 2.
        *(pytest.param(name, (1, 2, 3, 4), marks=[pytest.mark.slow] * (name != "digits")) for name in RUNS),
        *(pytest.param(name, (1, 2, 3, 4), marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, (1, 5, 6, 7, 8), marks=pytest.mark.slow) for name in ("digits", "drawn")),
        pytest.param("digits", (1, 8), marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_the_same_on_any_number_of_processes(name: str, worlds: Sequence[int], tmp_path: Path) -> None:
    words = (RUNS | SLOW)[name]
    if name == "folder":
        words += f" --data.root {photographs(tmp_path / 'photographs')}"
    for processes in worlds:
        trained(tmp_path / str(processes), words, processes, launcher=processes == 2 and name == "batchnorm")
    for processes in worlds[1:]:
        assert_same(tmp_path / "1", tmp_path / str(processes))


@pytest.mark.slow
def test_in_bf16_too(tmp_path: Path) -> None:
    words = RUNS["batchnorm"]
    for processes in (1, 2):
        trained(tmp_path / str(processes), words, processes, ACCELERATE_MIXED_PRECISION="bf16")
    assert_same(tmp_path / "1", tmp_path / "2")
