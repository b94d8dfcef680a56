"""Losses and gradients that are not finite, made for real: by an image that explodes, and by a huge learning rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import lines_of, run
from PIL import Image
from safetensors.torch import load_file

from accel_train.checkpoint.directory import checkpoint_path, find_newest_checkpoint, list_updates
from accel_train.step import _all_finite

BATCH, UPDATES = 8, 5  # of an epoch
# A net with BatchNorm, whose statistics the forward pass of a bad update spoils, and a mean of the weights.
SETTINGS = ("--model.name", "test_resnet", "--model.image-size", 32, "--ema.enabled", "True")
KEEP = ("--checkpoint.every-updates", 1, "--checkpoint.keep", 99)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty black images but for a white one. With this `std` black is 0, and white more than a float32 can hold."""
    folder = tmp_path_factory.mktemp("exploding")
    for split, count in (("train", UPDATES * BATCH), ("test", 4)):
        for number in range(count):
            path = folder / "images" / split / "ab"[number % 2] / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            white = (split, number) == ("train", 17)
            Image.new("RGB", (32, 32), (255 * white,) * 3).save(path)
    text = f"""
about: {{reproduces: nothing, accuracy: none, runs_on: anything}}
epochs: 1
batch_size: {BATCH}
virtual_batch_size: 4
data: {{name: folder, root: {folder / "images"}, workers: 0}}
augment: {{resize: 32, mean: [0.0, 0.0, 0.0], std: [1.0e-39, 1.0e-39, 1.0e-39]}}
optim: {{name: adamw, lr: 0.01}}
"""
    path = folder / "exploding.yaml"
    path.write_text(text)
    return path


def states(directory: Path, update: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: the model's, EMA's, the optimizer's."""
    place = checkpoint_path(directory / "checkpoints", update)
    found = {
        f"{name}/{key}": value
        for name in ("model", "ema")
        for key, value in load_file(place / f"{name}.safetensors").items()
    }
    optimizer = torch.load(next(place.glob("optimizer*")), weights_only=True)

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, each in value.items():
                walk(f"{prefix}/{key}", each)

    walk("optimizer", optimizer)
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adadelta"])
def test_stop_then_go_on_with_skip(recipe: Path, tmp_path: Path, optimizer: str) -> None:
    directory = tmp_path / "run"
    words = (recipe, *SETTINGS, *KEEP, "--optim.name", optimizer, "--output-dir", directory)
    stopped = run(*words, processes=2)
    assert stopped.returncode != 0
    bad = list_updates(directory / "checkpoints")[-1] + 1 if (directory / "checkpoints").exists() else 1
    assert f"error: Update {bad} is not finite: the loss of" in stopped.stderr
    assert stopped.stderr.count("is not finite") == 1  # said by one process
    status = json.loads((directory / "status.json").read_text())
    assert status["state"] == "failed"
    assert f"Update {bad} is not finite" in status["reason"]
    assert not (directory / "REQUEUE").exists()
    assert lines_of(directory, "event")[-1]["action"] == "stop"

    resumed = run(*words, "--on-nonfinite", "skip")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads((directory / "status.json").read_text())["skipped_updates"] == 1
    # A later start, of more epochs, remembers it, and meets the same image once more.
    (directory / "result.json").unlink()
    longer = run(*words, "--on-nonfinite", "skip", "--epochs", 2)
    assert longer.returncode == 0, longer.stderr
    assert json.loads((directory / "result.json").read_text())["skipped_updates"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "optimizer"), [(1, "adamw"), (2, "adamw"), (2, "adadelta")])
def test_skip_leaves_all_as_it_was(recipe: Path, tmp_path: Path, processes: int, optimizer: str) -> None:
    words = (recipe, *SETTINGS, *KEEP, "--optim.name", optimizer, "--on-nonfinite", "skip")
    words = (*words, "--output-dir", tmp_path / "skip")
    skipped = run(*words, processes=processes)
    assert skipped.returncode == 0, skipped.stderr
    (bad,) = [
        int(str(event["update"])) for event in lines_of(tmp_path / "skip", "event") if event.get("action") == "skip"
    ]
    assert f"update {bad} is not finite" in skipped.stderr + skipped.stdout
    if bad > 1:
        assert_equal(states(tmp_path / "skip", bad - 1), states(tmp_path / "skip", bad))
    end = states(tmp_path / "skip", UPDATES)
    assert all(value.isfinite().all() for value in end.values())
    assert json.loads((tmp_path / "skip" / "result.json").read_text())["skipped_updates"] == 1
    found = find_newest_checkpoint(tmp_path / "skip")
    assert found is not None
    position = json.loads((found / "state.json").read_text())["train"]
    assert (position["skipped_updates"], position["skipped_in_a_row"]) == (1, int(bad == UPDATES))


@pytest.mark.ci
def test_bitwise_skip_comes_to_the_same_bits_on_any_number_of_processes(recipe: Path, tmp_path: Path) -> None:
    """The exact sum of a gradient that is not finite is not finite on all processes, and the update leaves nothing."""
    for processes in (1, 2):
        directory = tmp_path / str(processes)
        words = (recipe, *SETTINGS, "--bitwise", "true", "--on-nonfinite", "skip", "--output-dir", directory)
        done = run(*words, processes=processes)
        assert done.returncode == 0, done.stderr
        assert json.loads((directory / "result.json").read_text())["skipped_updates"] == 1
    one, two = (states(tmp_path / str(processes), UPDATES) for processes in (1, 2))
    assert all(value.isfinite().all() for value in one.values())
    assert_equal(one, two)


def test_a_model_that_is_broken_is_not_skipped_for_ever(tmp_path: Path) -> None:
    broken = run(
        "digits", "--optim.lr", "1e30", "--epochs", 1, "--on-nonfinite", "skip", "--output-dir", tmp_path / "run"
    )
    assert broken.returncode == 2
    assert "the 10 updates before it were skipped" in broken.stderr
    actions = [event.get("action") for event in lines_of(tmp_path / "run", "event")]
    assert actions == ["skip"] * 10 + ["stop"]


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0])
def test_one_value_among_many_is_found(value: float, place: int) -> None:
    """And no finite ones are taken for it, though their sum is infinite."""
    gradients = [torch.randn(70_000), torch.randn(3, 5, 3, 3).to(memory_format=torch.channels_last), torch.randn(1)]
    flat = gradients[place].permute(0, 2, 3, 1).reshape(-1) if place == 1 else gradients[place]
    flat[[0, -1]] = value
    gradients[place] = flat.view(3, 3, 3, 5).permute(0, 3, 1, 2) if place == 1 else flat
    assert _all_finite(gradients) == math.isfinite(value)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "There is no checkpoint yet; start again with another optim.lr, or"),
        (("--checkpoint.every-updates", 1), "The last checkpoint is intact; continue from it with another optim.lr"),
    ],
)
def test_a_checkpoint_is_named_only_if_there_is_one(tmp_path: Path, options: tuple[object, ...], message: str) -> None:
    done = run("digits", "--optim.name", "momentum", "--optim.lr", 1e30, *options, "--output-dir", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert bool(list_updates(tmp_path / "run" / "checkpoints")) == bool(options)
