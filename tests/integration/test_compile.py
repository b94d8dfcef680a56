"""torch.compile (`accelerate launch --dynamo_backend`) does not change the run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from safetensors.torch import load_file

# Two processes, two micro-batches an update; a backend of torch.compile that is quick to compile.
MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    def forward(self, images):  # torch compiles no forward of its own under DDP
        for layer in self:
            images = layer(images)
        return images

def layers(num_classes, in_chans):
    \"\"\"BatchNorm and dropout: all that is told of the samples.\"\"\"
    return [
        nn.Conv2d(in_chans, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(288, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, num_classes),
    ]

def net(num_classes, in_chans, image_size):
    return Net(*layers(num_classes, in_chans))

class SameMemory(torch.autograd.Function):
    \"\"\"The identity, whose result is the same memory at each call, as that of a CUDA graph.\"\"\"

    results = {}

    @staticmethod
    def forward(ctx, values):
        return SameMemory.results.setdefault(values.shape, torch.empty_like(values)).copy_(values).detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient

class Overwriting(Net):
    def forward(self, images):
        return SameMemory.apply(super().forward(images))

def overwriting(num_classes, in_chans, image_size):
    return Overwriting(*layers(num_classes, in_chans))
"""
# The fifth update of each epoch has padding, and so has the evaluation.
WITH_MODEL = """
    digits --epochs 2 --batch-size 24 --virtual-batch-size 4 --data.train-limit 100 --data.test-limit 40
    --log-every-updates 3 --model.name
""".split()  # noqa: SIM905
RUN = """
    digits --epochs 1 --batch-size 16 --micro-batch-size 4 --data.train-limit 96 --data.test-limit 32
    --log-every-updates 1 --ema.enabled true --optim.clip 1
""".split()  # noqa: SIM905
COMPILED: dict[str, Any] = {"ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER"}  # as accelerate launch --dynamo_backend sets it


def train(run: Path, words: Sequence[str] = RUN, processes: int = 2, **variables: str) -> str:
    line = ("tests/compile_worker.py", *words, "--output-dir", run)
    done = helpers.python(*line, processes=processes, cwd=helpers.ROOT, **variables)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    assert bool(re.search(r"^compiled \w+$", done.stdout, re.MULTILINE)) == bool(variables)
    return done.stdout


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.slow
def test_compiled_or_not_is_the_same_run_and_one_all_reduce_an_update(tmp_path: Path) -> None:
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    assert re.findall(r"all-reduces: (\d+)", train(plain)) == ["6", "6"]
    compiled.mkdir()
    (compiled / "STOP").touch()
    said = train(compiled, **COMPILED)  # goes on without compilation
    first = re.findall(r"all-reduces: (\d+)", said)
    assert set(re.findall(r"graphs: (\d+)", said)) <= {"1", "2"}  # of training; and of evaluation, unless it stopped
    (stopped,) = (
        line["update"]
        for line in map(json.loads, (compiled / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "checkpoint"
    )
    assert first == [str(stopped)] * 2
    assert re.findall(r"all-reduces: (\d+)", train(compiled)) == [str(6 - stopped)] * 2
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "mine.py"
    file.write_text(MODEL)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_two_graphs_suffice(model: Path, tmp_path: Path, processes: int) -> None:
    """One for training, whether an update is padded or not, and one for evaluation. DDP's warm-up compiles none, and it
    does what it is for: all updates lay the gradients out in one way."""
    said = train(tmp_path / "run", [*WITH_MODEL, f"{model}:net"], processes, **COMPILED)
    assert re.findall(r"graphs: (\d+)", said) == ["2"] * processes
    assert re.findall(r"unchanged: (\w+)", said) == ["True"] * processes
    if processes > 1:
        assert re.findall(r"all-reduces: (\d+), layouts: (\d+)", said) == [("10", "1")] * processes
        assert re.findall(r"those of the warm-up: (\d+), common: (\d+)", said) == [("1", "0")] * processes


@pytest.mark.slow
def test_inductor_computes_the_same_run(model: Path, tmp_path: Path) -> None:
    words = [*WITH_MODEL, f"{model}:net", "--log-every-updates", "1", "--optim.lr", "0.01"]
    said = train(tmp_path / "compiled", words, 1, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    assert re.findall(r"graphs: (\d+)", said) == ["2"]
    train(tmp_path / "plain", words, 1)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    compiled, plain = (load_file(tmp_path / run / "model.safetensors") for run in ("compiled", "plain"))
    assert compiled.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text)  # type: ignore[misc]


@pytest.mark.slow
def test_a_model_may_write_its_output_to_the_same_memory(model: Path, tmp_path: Path) -> None:
    """As a CUDA graph does: nothing that is kept over its calls is read from there."""
    found = []
    for name in ("net", "overwriting"):
        run, predictions = tmp_path / name, tmp_path / f"{name}.npz"
        words = [*WITH_MODEL, f"{model}:{name}", "--eval-batch-size", "16", "--micro-batch-size", "8"]
        train(run, [*words, "--ema.enabled", "true"], 1)
        done = helpers.python(
            "-m", "accel_train", "evaluate", run, "--predictions", predictions, "--trust-code", "true"
        )
        assert done.returncode == 0, done.stderr
        found.append((losses(run), helpers.read_predictions(predictions).logits.tolist()))
    assert found[0] == found[1]
