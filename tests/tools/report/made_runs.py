"""Runs that nobody has trained: the files of a finished run, with the answers that a test wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from accel_train.config.options import parse
from accel_train.config.schema import Config, as_dict, to_yaml
from accel_train.files import sha256
from accel_train.records.model_info import ModelInfo
from accel_train.task import ONE_LABEL, task_of
from accel_train.tools.evaluate_run import Predictions, added_metrics

IMAGES = 400


def config_of(folder: Path, *words: object, images: int = IMAGES) -> Config:
    data = ["synthetic", "--model.image-size", "8", "--data.channels", "1"]
    counts = ["--data.test-limit", images, "--output-dir", folder]
    return parse([str(word) for word in ("digits", "--data.name", *data, *counts, *words)])


def answers(wrong: Sequence[int], classes: int = 10, images: int = IMAGES) -> npt.NDArray[np.float32]:
    """Logits for the synthetic test images, right but for the images `wrong`, which are said to be the next class."""
    labels = np.arange(images) % classes
    said = labels.copy()
    said[list(wrong)] = (said[list(wrong)] + 1) % classes
    logits = np.zeros((images, classes), np.float32)
    logits[np.arange(images), said] = 4 + np.arange(images) / images
    return logits


def make_run(
    folder: Path,
    logits: npt.NDArray[np.float32] | None,
    *words: object,
    names: Sequence[str] | None = None,
    labels: npt.NDArray[Any] | None = None,
    curves: bool = False,
    **result: Any,
) -> Path:
    """Write a run with these predictions of its test split, or without. `words`: options; `result`: more figures."""
    classes = 10 if logits is None else logits.shape[1]
    images = IMAGES if logits is None else len(logits)
    config = config_of(folder, *words, images=images)
    titles = tuple(names or map(str, range(classes)))
    task = ONE_LABEL if labels is None else task_of(torch.from_numpy(labels))
    info = ModelInfo(titles, 1, 8, 8, (0.5,), (0.5,), task=task)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "model.json").write_text(info.to_json())
    save_file({"weight": torch.rand(3)}, folder / "model.safetensors")
    found = {"test_images": images, "images_per_second": 2954.85, "train_seconds": 2.95485, "epochs": 2, "updates": 60}
    if logits is not None:
        found |= write_predictions(folder, logits, config, titles, labels)
    (folder / "result.json").write_text(json.dumps(found | result))
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    if not curves:  # to draw them takes longer than all else
        return folder
    rows = [
        {"kind": "eval", "split": split, "weights": "model", "epoch": epoch, "update": 30 * epoch, "time": 1.0 * epoch,
         "loss": 1 / epoch, "accuracy": 1 - 0.5 / epoch}
        for epoch in (1, 2) for split in ("train", "test")
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_predictions(
    folder: Path,
    logits: npt.NDArray[np.float32],
    config: Config,
    names: tuple[str, ...],
    labels: npt.NDArray[Any] | None = None,
    paths: list[str] | None = None,
) -> dict[str, float]:
    """Keep them as a report does; return the figures for result.json."""
    true = np.arange(len(logits)) % logits.shape[1] if labels is None else labels
    about = {
        "run": str(folder), "weights": "model.safetensors", "sha256": sha256(folder / "model.safetensors"),
        "split": "test", "data": as_dict(config.data), "time": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    Predictions(np.arange(len(logits)), true, logits, paths, names, about).save(folder / "predictions-test.npz")
    figures: dict[str, Any] = {"weights": "model.safetensors", "count": len(logits), "loss": 0.5, "f1": 0.5}
    if true.ndim == 2:
        figures["map"] = 0.5
    else:
        figures["accuracy"] = float((logits.argmax(1) == true).mean())
        if np.isfinite(logits).all() and logits.shape[1] < 100:
            figures |= added_metrics(logits, true)
    record = {"split": "test", "time": about["time"], "data": about["data"], "classes": names, "model": figures}
    (folder / "evaluation-test.json").write_text(json.dumps(record))
    return {f"test_{name}": figures[name] for name in ("loss", "accuracy", "map", "f1") if name in figures}
