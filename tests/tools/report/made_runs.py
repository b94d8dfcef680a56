"""Runs that nobody has trained: the files of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from accel_train.config.options import parse
from accel_train.config.schema import to_yaml
from accel_train.records.model_info import ModelInfo


def make_run(folder: Path, *words: object, **result: Any) -> Path:
    """Write a run of two epochs, without predictions. `words`: options; `result`: more metrics of result.json."""
    data = ["synthetic", "--model.image-size", "8", "--data.channels", "1", "--data.test-limit", "400"]
    config = parse([str(word) for word in ("digits", "--data.name", *data, "--output-dir", folder, *words)])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "model.json").write_text(ModelInfo(tuple("0123456789"), 1, 8, 8, (0.5,), (0.5,)).to_json())
    save_file({"weight": torch.rand(3)}, folder / "model.safetensors")
    found = {"test_images": 400, "images_per_second": 2954.85, "train_seconds": 2.95485, "epochs": 2, "updates": 60}
    (folder / "result.json").write_text(json.dumps(found | result))
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    rows = [
        {"kind": "eval", "split": split, "weights": "model", "epoch": epoch, "update": 30 * epoch, "time": 1.0 * epoch,
         "loss": 1 / epoch, "accuracy": 1 - 0.5 / epoch}
        for epoch in (1, 2) for split in ("train", "test")
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
