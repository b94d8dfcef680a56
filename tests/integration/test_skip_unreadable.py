"""An image is unreadable in the middle of a run; with a list that names it the run continues."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from accel_train.checkpoint.directory import list_updates
from accel_train.cli import main
from accel_train.config.schema import Config, Data
from accel_train.data.order import Plan, TrainingSampler, create_draws
from accel_train.data.sources.load import load_splits

WORDS = "digits --batch-size 8 --epochs 2 --model.image-size 8 --augment.crop resized --augment.flip 0.5"
WORDS += " --checkpoint.every-updates 1 --data.workers 1 --data.name folder --data.val-fraction 0.1"


def tree(root: Path, sampler: str) -> Data:
    numbers = np.random.default_rng(0)
    for i in range(60):
        path = root / ("rare" if i % 6 == 0 else "usual") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
    return Data(name="folder", root=root, val_fraction=0.1, test_fraction=0.2, sampler=sampler)  # type: ignore[arg-type]


def words(data: Data, run: Path, *others: object) -> list[str]:
    root = f"--data.root {data.root} --data.test-fraction {data.test_fraction} --output-dir {run}"
    return ["train", *WORDS.split(), *root.split(), "--data.sampler", data.sampler, *map(str, others)]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["shuffle", "balanced"])
def test_the_list_given_later_makes_the_same_run_as_from_the_start(tmp_path: Path, sampler: str) -> None:
    data = tree(tmp_path / "images", sampler)
    train = load_splits(data, 0).train
    order = TrainingSampler(Plan(len(train), 8, 1, 1), 0, draws=create_draws(Config(data=data), train.labels))
    drawn = [int(id) for batch in order for id in batch.ids]
    bad = Path(train.name(max(set(drawn), key=drawn.index)))  # the image that is drawn as late as any in the epoch
    bad.write_bytes(bad.read_bytes()[:100])
    listed = tmp_path / "list"
    listed.write_text(f"{bad.relative_to(data.root)}\n")

    assert main(words(data, tmp_path / "one", "--data.skip-unreadable", listed)) == 0
    refused = helpers.run(*words(data, tmp_path / "other")[1:])
    assert refused.returncode == 2 and f"{bad} cannot be read" in refused.stderr
    at = list_updates(tmp_path / "other" / "checkpoints")[-1]
    assert at > 0
    assert main(words(data, tmp_path / "other", "--data.skip-unreadable", listed)) == 0

    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("one", "other")]
    assert [result["train_images"] for result in results] == [41, 41]
    weights = [load_file(tmp_path / run / "model.safetensors") for run in ("one", "other")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    lines = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert {line["count"] for line in lines if line["kind"] == "eval" and line["split"] == "train"} == {41}
    assert any(line["kind"] == "event" and line.get("text") == "resumed" and line["update"] == at for line in lines)
