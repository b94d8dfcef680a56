"""Training images that grow with the epochs: stopped and killed at the change, rewound over it, on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from accel_train.checkpoint.directory import delete_checkpoint, list_updates
from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.data.memory import MemoryLoader
from accel_train.data.sources.load import load_splits
from accel_train.launch.environment import prepare_environment
from accel_train.training_setup import connect, create_training_setup

UPDATES = 6  # of an epoch
COMMON = (
    "digits --data.train-limit 96 --batch-size 16 --virtual-batch-size 8 --model.name test_resnet "
    "--model.image-size 24 --schedule.name constant --ema.enabled false "
)
GROWING = "--model.progressive-sizes 8 16 --model.progressive-epochs 1 2 "
AUGMENT = "--augment.crop random --augment.pad 2 --augment.flip 0.5 --augment.erase 0.3 --augment.mixup 0.2 "


def events(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "event"]


def sizes(run: Path) -> list[tuple[int, int]]:
    """The epochs at which the size changed, and to which one."""
    return [(event["epoch"], event["image_size"]) for event in events(run) if event["text"] == "image size"]


def same_weights(one: Path, other: Path) -> bool:
    weights = [load_file(run / "model.safetensors") for run in (one, other)]
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_the_same_bits_on_two_processes_and_after_a_kill_behind_the_change(tmp_path: Path) -> None:
    words = (*(COMMON + GROWING + AUGMENT).split(), "--epochs", 4, "--bitwise", "true")
    words += ("--checkpoint.every-updates", 1, "--checkpoint.keep", 90)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = helpers.run(*words, "--output-dir", whole, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert sizes(whole) == [(1, 8), (2, 16), (3, 24)]
    assert "epoch 2/4  training images of 16x16 pixels" in ended.stdout + ended.stderr
    # Killed at each kind of place: within the last epoch of a size, at its end, and behind the change.
    for update, processes in ((UPDATES - 1, 1), (UPDATES, 2), (2 * UPDATES + 1, 1)):
        with helpers.started(parts, *words, processes=processes) as started:
            started.until(lambda: (parts / f"checkpoints/update-{update:08d}").exists())  # noqa: B023
        for later in list_updates(parts / "checkpoints"):
            if later > update:
                delete_checkpoint(parts / "checkpoints", later)
        for name in ("result.json", "model.safetensors"):
            (parts / name).unlink(missing_ok=True)
    ended = helpers.run(*words, "--output-dir", parts)
    assert ended.returncode == 0, ended.stderr
    assert same_weights(whole, parts)


@pytest.mark.ci
def test_a_rewind_goes_back_over_the_change(tmp_path: Path) -> None:
    """One image is white, which is more than a float32 can hold: each epoch has an update that is not finite."""
    for number in range(16):
        path = tmp_path / "images" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 24), (255 * (number == 5),) * 3).save(path)
    words = (
        f"digits --data.name folder --data.root {tmp_path}/images --data.workers 0 --batch-size 4 --epochs 3 "
        "--virtual-batch-size 4 --augment.mean 0 0 0 --augment.std 1e-39 1e-39 1e-39 --model.name test_resnet "
        "--model.image-size 24 --schedule.name constant --model.progressive-sizes 8 --model.progressive-epochs 1 "
        "--checkpoint.every-epochs 9 --ema.enabled false --data.val-fraction 0"
    ).split()
    for policy in ("skip", "rewind"):
        ended = helpers.run(*words, "--on-nonfinite", policy, "--output-dir", tmp_path / policy)
        assert ended.returncode == 0, ended.stderr
        left_out = json.loads((tmp_path / policy / "result.json").read_text())["left_out_updates"]
        assert left_out == 3
    assert same_weights(tmp_path / "skip", tmp_path / "rewind")
    # From the second epoch and from the third, each time to the beginning.
    text = (tmp_path / "rewind" / "metrics.jsonl").read_text()
    assert text.count('"rewound"') >= 1 and sizes(tmp_path / "rewind")[-2:] == [(1, 8), (2, 24)]


@pytest.mark.ci
@pytest.mark.usefixtures("fresh_accelerate")
def test_an_epoch_is_what_it_is_in_a_run_of_its_size(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    words = ["train", *(COMMON + AUGMENT).split()]
    growing = ["--model.progressive-sizes", "16", "--model.progressive-epochs", "1"]
    assert main([*words, *growing, "--epochs", "2", "--output-dir", str(one)]) == 0
    at_small = ["--model.image-size", "16", "--epochs", "1", "--output-dir", str(other)]
    assert main([*words, *at_small]) == 0
    goes_on = ["--epochs", "2", "--output-dir", str(other), "--allow-change", "model.image-size", "epochs"]
    assert main([*words, *goes_on]) == 0
    assert same_weights(one, other)
    assert sizes(one) == [(1, 16), (2, 24)] and sizes(other) == []
    # The run's folder knows the size that the model is used with.
    assert json.loads((one / "model.json").read_text())["image_size"] == 24


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerate")
def test_image_files_shrink_in_proportion_and_workers_end_with_their_size(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "images" / "train" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    words = COMMON.replace("--data.train-limit 96", f"--data.name folder --data.root {tmp_path}/images").split()
    words += [*GROWING.split(), "--augment.resize", "32", "--augment.crop", "random", "--epochs", "3"]
    for workers in ("0", "2"):
        assert main(["train", *words, "--data.workers", workers, "--output-dir", str(tmp_path / workers)]) == 0
    assert same_weights(tmp_path / "0", tmp_path / "2")
    setup = setup_of(words)
    assert setup.progressive is not None
    seen = []
    for epoch in (0, 1, 2, 0):
        setup.progressive.begin_epoch(epoch)
        setup.sampler.seek(epoch)
        inputs, _ = setup.training.transform(next(iter(setup.training.batches)))
        dataset: Any = setup.training.loader.dataset  # type: ignore[attr-defined]
        seen.append((inputs.shape[-1], dataset.transform.short_side))
    assert seen == [(8, 11), (16, 21), (24, 32), (8, 11)]


def setup_of(words: list[str]) -> Any:
    config = parse(words)
    launch = prepare_environment()
    return create_training_setup(config, launch, connect(config, launch), load_splits(config.data, config.seed))


@pytest.mark.usefixtures("fresh_accelerate")
def test_images_in_memory_are_kept_once() -> None:
    setup = setup_of((COMMON + GROWING + "--epochs 4").split())
    loaders = []
    for epoch in range(3):
        assert setup.progressive.begin_epoch(epoch) == (8, 16, 24)[epoch]
        assert isinstance(setup.training.loader, MemoryLoader)
        loaders.append(setup.training.loader)
    assert len({id(loader) for loader in loaders}) == 3
    assert len({id(loader.pixels) for loader in loaders}) == 1
    assert setup.progressive.begin_epoch(3) is None


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (COMMON + "--model.progressive-sizes 8 --epochs 4", "model.progressive-epochs: expected as many epochs as"),
        (COMMON + GROWING + "--epochs 2", "model.progressive-epochs: expected epochs below the 2 of the run"),
        (COMMON + "--model.progressive-sizes 16 8 --model.progressive-epochs 1 2 --epochs 4", "in increasing order"),
        (COMMON + GROWING + "--epochs 4 --model.image-size 16", "--model.progressive-sizes: found 16, but the images"),
        ("digits --epochs 4 --model.progressive-sizes 4 --model.progressive-epochs 1", "take images of 4x4"),
        (
            COMMON + GROWING + "--epochs 4 --augment.crop random --augment.pad 9 --augment.pad-mode reflect",
            "--augment.pad: found 9, but images have 8 pixels",
        ),
    ],
)
def test_what_does_not_fit_is_one_line_at_the_start(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words.split(), "--output-dir", str(tmp_path / "run")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
