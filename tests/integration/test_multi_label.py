"""Images with several labels or none: figures, promises and predictions of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import Captured, classes_in, environment, lines_of, result_of, run, write_digits
from sklearn.metrics import average_precision_score, f1_score

from accel_train.api import load_run
from accel_train.data.sources.load import load_splits

DATA = '''
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

def data():
    """Up to four digits in one image of 16 x 16 pixels: each digit that is there is a label."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.images * 15.9375, dtype=torch.uint8), torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)

    def some(numbers, count):
        chosen = numbers[torch.randint(len(numbers), (count, 4), generator=generator)]
        there = torch.rand(count, 4, generator=generator) < 0.4
        parts = pixels[chosen] * there[:, :, None, None]
        images = torch.cat([torch.cat([parts[:, 0], parts[:, 1]], 2), torch.cat([parts[:, 2], parts[:, 3]], 2)], 1)
        rows = torch.zeros(count, 10, dtype=torch.int64).scatter_reduce_(1, labels[chosen], there.long(), "amax")
        dataset = TensorDataset(images[:, None], rows)
        dataset.classes, dataset.targets = [f"has-{number}" for number in range(10)], rows
        return dataset

    order = torch.randperm(len(pixels), generator=generator)
    return {"train": some(order[:1400], 500), "val": some(order[1400:], 90), "test": some(order[1400:], 110)}
'''
RECIPE = """
data: {name: mine.py:data, workers: 0}
model: {name: mnist_cnn, image_size: 28, dropout: 0.1}
augment: {mixup: 0.2}
loss: {name: bce, label_smoothing: 0.02}
optim: {name: adamw, lr: 0.002}
ema: {enabled: true, decay: 0.8}
epochs: 2
batch_size: 48
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several")
    (path / "mine.py").write_text(DATA)
    (path / "recipe.yaml").write_text(RECIPE)
    return path


def trained(folder: Path, processes: int, *words: str) -> Path:
    output = folder / f"run-{processes}-{len(words)}"
    run(folder / "recipe.yaml", "--output-dir", output, *words, processes=processes)
    return output


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    return trained(folder, 1)


@pytest.mark.slow
def test_the_figures_are_those_of_a_plain_loop(single: Path) -> None:
    """Of the weights that the run wrote, sample by sample, by scikit-learn."""
    loaded, found = load_run(single), result_of(single)
    test = load_splits(loaded.config.data, loaded.config.seed).test
    assert test is not None
    logits = []
    with torch.inference_mode():
        for id in range(len(test)):
            logits.append(loaded.model(loaded.transform(test.fetch([id])[0])[None])[0])
    scores, truth = torch.stack(logits), test.labels.numpy()
    assert found["ema_test_map"] == pytest.approx(average_precision_score(truth, scores, average="macro"), abs=1e-6)
    assert found["ema_test_f1"] == pytest.approx(f1_score(truth, scores >= 0, average="macro"), abs=1e-6)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, test.labels.float())
    assert found["ema_test_loss"] == pytest.approx(float(loss), abs=1e-6)
    assert found["class_images"] == test.labels.sum(0).tolist()
    training = lines_of(single, "train")
    assert training and all("accuracy" not in line for line in training)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_several_processes_evaluate_the_same(single: Path, processes: int) -> None:
    evaluated = Captured(
        ["-m", "accel_train", "evaluate", single, "--trust-code", "true"], environment(), processes=processes
    )
    _, err = evaluated.communicate()
    assert evaluated.returncode == 0, err
    record, figures = json.loads((single / "evaluation-test.json").read_text()), result_of(single)
    assert record["processes"] == processes
    for name in ("loss", "map", "f1"):
        assert record["model"][name] == pytest.approx(figures[f"test_{name}"], abs=1e-6)


@pytest.mark.slow
def test_bitwise_runs_have_equal_weights(folder: Path) -> None:
    words = ("--bitwise", "true", "--epochs", "1")
    one, two = (trained(folder, processes, *words) for processes in (1, 2))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    same = [{key: value for key, value in result_of(path).items() if key.startswith("test_")} for path in (one, two)]
    assert same[0] == same[1]


def said(*words: object) -> tuple[int, str, str]:
    process = Captured(["-m", "accel_train", *words], environment())
    out, err = process.communicate()
    return process.returncode or 0, out, err


@pytest.mark.ci
def test_predict_shows_all_classes_from_the_threshold_on(single: Path) -> None:
    images = write_digits(single / "images")
    output = single / "predictions.csv"
    shown = {}
    for threshold in ("0", "0.3", "1"):
        code, _, err = said("predict", single, *images, "--threshold", threshold, "--output", output)
        assert code == 0, err
        shown[threshold] = [line["predictions"] for line in classes_in(output)]
    assert all(len(classes) == 10 for classes in shown["0"]) and not any(shown["1"])
    for every, some in zip(shown["0"], shown["0.3"], strict=True):
        assert some == [pair for pair in every if pair["probability"] >= 0.3]
    code, out, _ = said("predict", single, images[0], "--threshold", "1")
    assert code == 0 and out.split()[-1] == "none"


def test_evaluate_prints_each_class(single: Path) -> None:
    code, out, err = said("evaluate", single, "--trust-code", "true")
    assert code == 0, err
    record = json.loads((single / "evaluation-test.json").read_text())
    assert record["ema"]["map"] == result_of(single)["ema_test_map"] and "confusion" not in record["ema"]
    row = next(line for line in out.splitlines() if line.startswith("has-3")).split()
    assert row[1] == str(record["ema"]["class_images"][3])
    assert f"{record['ema']['class_average_precision'][3]:.2%}" in row


@pytest.mark.ci
def test_a_threshold_needs_several_labels(tmp_path: Path) -> None:
    run("digits", "--epochs", "1", "--output-dir", tmp_path / "run")
    image = write_digits(tmp_path, 1)[0]
    code, _, err = said("predict", tmp_path / "run", image, "--threshold", "0.3")
    assert code == 2 and "--threshold 0.3: the run was trained with one label an image" in err
    code, _, err = said("predict", tmp_path / "run", image, "--threshold", "3")
    assert code == 2 and "--threshold: expected a number from 0 to 1, found '3" in err
