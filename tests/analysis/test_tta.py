"""Test-time augmentation: the mean of the probabilities over views, against the same by hand."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn
from torchvision.transforms import v2

from accel_train import cli
from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.inference.tta import MeanOverViews, mean_of_sigmoids, mean_of_softmaxes
from accel_train.analysis.loaded_run import LoadedRun, load
from accel_train.analysis.predictions import Predictions, read_predictions
from accel_train.api import evaluate, load_run, predict
from accel_train.config.declaration import Tta
from accel_train.data.sources.files.images import decode
from accel_train.data.sources.load import load_splits
from accel_train.errors import UserError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

LOGITS = arrays(
    np.float32,
    st.tuples(st.integers(1, 10), st.integers(1, 3), st.integers(2, 6)),
    elements=st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-1e4, 1e4])),
)  # [views, images, classes]


@given(LOGITS)
def test_the_softmax_of_the_result_is_the_mean_of_the_softmaxes(values: np.ndarray[Any, Any]) -> None:
    logits = torch.from_numpy(values)
    found = mean_of_softmaxes(logits)
    assert found.dtype == torch.float32 and found.isfinite().all()
    wanted = logits.double().softmax(2).mean(0)
    torch.testing.assert_close(found.softmax(1).double(), wanted, atol=1e-5, rtol=1e-4)
    # It is the logarithm of probabilities already.
    torch.testing.assert_close(found.exp().sum(1), torch.ones(len(found)), atol=1e-4, rtol=0)


@given(LOGITS)
def test_the_sigmoid_of_the_result_is_the_mean_of_the_sigmoids(values: np.ndarray[Any, Any]) -> None:
    logits = torch.from_numpy(values)
    found = mean_of_sigmoids(logits)
    assert found.dtype == torch.float32 and found.isfinite().all()
    wanted = logits.double().sigmoid().mean(0)
    torch.testing.assert_close(found.sigmoid().double(), wanted, atol=1e-5, rtol=1e-4)


@given(LOGITS, st.integers(1, 10))
def test_equal_views_give_the_plain_result(values: np.ndarray[Any, Any], views: int) -> None:
    plain = torch.from_numpy(values)[0]
    stacked = plain.expand(views, *plain.shape)
    torch.testing.assert_close(mean_of_softmaxes(stacked), plain.log_softmax(1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(mean_of_sigmoids(stacked), plain, atol=1e-4, rtol=1e-5)


def test_nan_is_not_hidden_and_an_excluded_class_stays_so() -> None:
    logits = torch.tensor([[[1.0, math.nan]], [[1.0, 2.0]]])
    assert mean_of_softmaxes(logits).isnan().all() and mean_of_sigmoids(logits)[0, 1].isnan()
    excluded = mean_of_softmaxes(torch.tensor([[[1.0, -math.inf]], [[1.0, -math.inf]]]))
    torch.testing.assert_close(excluded, torch.tensor([[0.0, -math.inf]]))


def test_the_views_are_those_of_torchvision() -> None:
    seen: list[Tensor] = []

    class Net(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return images.flatten(1)[:, :3]

    images = torch.rand(2, 3, 9, 9).to(memory_format=torch.channels_last)
    MeanOverViews(Net(), "ten-crop", 6, multi_label=False)(images)
    for found, wanted in zip(seen, v2.TenCrop(6)(images), strict=True):
        assert torch.equal(found, wanted)
    seen.clear()
    MeanOverViews(Net(), "flip", 9, multi_label=False)(images)
    assert (
        torch.equal(seen[0], images) and torch.equal(seen[1], v2.RandomHorizontalFlip(1.0)(images)) and len(seen) == 2
    )


@pytest.fixture
def run(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


def by_hand(loaded: LoadedRun, weights: str) -> tuple[Tensor, Tensor]:
    """(the mean probabilities of the test images and their mirror images, the labels)"""
    test = load_splits(loaded.config.data, loaded.config.seed).test
    assert test is not None
    pixels = test.fetch(range(len(test)))
    assert isinstance(pixels, Tensor)
    inputs = (pixels / 255 - loaded.info.mean[0]) / loaded.info.std[0]
    model = load(loaded.path, weights=weights).model.double()
    with torch.inference_mode():
        views = [model(view.double()).softmax(1) for view in (inputs, inputs.flip(-1))]
    return (views[0] + views[1]) / 2, test.labels


def test_evaluate_says_what_it_is_and_keeps_the_plain_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run)]) == 0
    plain = (run / "evaluation-test.json").read_text()
    assert "test-time" not in capsys.readouterr().out and "tta" not in plain
    assert cli.main(["evaluate", str(run), "--tta", "flip", "--predictions", str(run / "p.npz")]) == 0
    out = capsys.readouterr().out
    assert "test-time augmentation: flip" in out and str(run / "evaluation-test-tta-flip.json") in out
    assert (run / "evaluation-test.json").read_text() == plain
    assert len(list((run / "evaluations").glob("test-tta-flip-*.json"))) == 1
    figures = json.loads((run / "evaluation-test-tta-flip.json").read_text())
    assert figures["tta"] == "flip"
    for weights in ("model", "ema"):
        probabilities, labels = by_hand(load(run), weights)
        assert figures[weights]["accuracy"] == (probabilities.argmax(1) == labels).double().mean()
        of_labels = probabilities.gather(1, labels[:, None]).log().mean()
        assert figures[weights]["loss"] == pytest.approx(-of_labels.item(), abs=1e-6)
    found = read_predictions(run / "p.npz")
    assert found.about["tta"] == "flip"
    np.testing.assert_allclose(np.exp(found.logits), probabilities.numpy(), atol=1e-6)
    # A figure that a report or the calibration reads as the plain model's would be another one.
    assert json.loads(plain)["ema"]["loss"] != figures["ema"]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--tta", "flip"), ("--tta", "ten-crop", "--augment.resize", "10")])
def test_two_processes_compute_the_same(run: Path, words: tuple[str, str]) -> None:
    found: list[tuple[dict[str, Any], Predictions]] = []
    for processes in (1, 2):
        file = run / f"{processes}.npz"
        done = helpers.python("-m", "accel_train", "evaluate", run, *words, "--predictions", file, processes=processes)
        assert done.returncode == 0, done.stderr
        found.append((json.loads((run / f"evaluation-test-tta-{words[1]}.json").read_text()), read_predictions(file)))
    (alone, one), (together, two) = found
    assert (alone["processes"], together["processes"]) == (1, 2)
    np.testing.assert_allclose(one.logits, two.logits, atol=1e-5)
    for name in ("model", "ema"):
        assert together[name]["confusion"] == alone[name]["confusion"]
        assert together[name]["loss"] == pytest.approx(alone[name]["loss"], abs=1e-6)


def test_predict_is_the_mean_and_is_not_calibrated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(run)]) == 0  # fits a temperature
    images = sorted((run / "examples").glob("*.png"))
    loaded = load_run(run)
    assert loaded.calibration.temperature is not None and predict(loaded, images[:1])[0].calibrated
    for found, image in zip(predict(loaded, images, tta="flip", top_k=10), images, strict=True):
        inputs = loaded.transform(image)[None]
        with torch.inference_mode():
            wanted = (loaded.model(inputs).softmax(1) + loaded.model(inputs.flip(-1)).softmax(1))[0] / 2
        order = [loaded.classes.index(name) for name in found.classes]
        assert found.probabilities == pytest.approx(wanted[order].tolist(), abs=1e-6)
        assert found.calibrated == () and list(found.probabilities) == sorted(found.probabilities, reverse=True)
    capsys.readouterr()
    assert cli.main(["predict", str(run), str(images[0]), "--tta", "flip"]) == 0
    out, err = capsys.readouterr()
    assert "test-time augmentation: flip" in err and "not calibrated: a temperature is fitted without" in err
    assert "calibrated" not in out


def test_ten_crops_of_the_resized_image(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = next((run / "examples").glob("*.png"))
    larger = load(run, overrides=["--augment.resize=11"])
    (found,) = larger.predict([image], top_k=10, tta="ten-crop")
    whole = Preprocessing(larger.info.at_size(11), larger.config.augment)
    at_once = whole.to_input(whole.resize(decode(image.read_bytes(), 1)))[0]
    assert at_once.shape == (1, 11, 11)
    with torch.inference_mode():
        crops = torch.stack(v2.TenCrop(8)(at_once))
        wanted = larger.model(crops).softmax(1).mean(0)
    order = [larger.classes.index(name) for name in found.classes]
    assert found.probabilities == pytest.approx(wanted[order].tolist(), abs=1e-6)
    for command in (["evaluate", str(run)], ["predict", str(run), str(image)]):
        assert cli.main([*command, "--tta", "ten-crop"]) == 2
        assert "all crops are the same; give a larger --augment.resize, such as 9" in capsys.readouterr().err


def test_from_python(run: Path) -> None:
    plain, flip = evaluate(run), evaluate(run, tta="flip")
    assert "tta" not in plain.figures and flip.figures["tta"] == "flip" and flip.name == "test-tta-flip"
    assert plain.last["loss"] != flip.last["loss"]
    assert "tta flip" in repr(flip) and "tta" not in repr(plain)
    wrong: Any = "flop"
    for call in (lambda: evaluate(run, tta=wrong), lambda: predict(run, [], tta=wrong)):
        with pytest.raises(UserError, match=r"one of none, flip, ten-crop, found 'flop'\. Did you mean 'flip'"):
            call()


@pytest.mark.parametrize("command", ["evaluate", "predict"])
@pytest.mark.parametrize("word", ["augment", "test-time-augmentation", "tta-views", "ten-crop"])
def test_other_names_of_it(run: Path, command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    images = [str(next((run / "examples").glob("*.png")))] * (command == "predict")
    assert cli.main([command, str(run), *images, f"--{word}", "true"]) == 2
    assert "Did you mean 'tta'?" in capsys.readouterr().err


MULTI_LABEL = """
import torch
from torch.utils.data import TensorDataset

def data():
    images = torch.randint(0, 256, (24, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = torch.stack([images[:, 0, 0, 0] > 100, images[:, 0, 7, 7] > 128, images[:, 0, 3, 3] > 90], 1).long()
    dataset = TensorDataset(images, rows)
    dataset.classes, dataset.targets = ["a", "b", "c"], rows
    return {"train": dataset, "test": dataset}
"""


def test_with_several_labels_it_is_the_mean_of_the_sigmoids(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MULTI_LABEL)
    run = tmp_path / "run"
    line = "train digits --epochs 1 --batch-size 8 --loss.name bce --schedule.name constant --data.workers 0"
    assert cli.main([*line.split(), "--data.name", f"{tmp_path}/mine.py:data", "--output-dir", str(run)]) == 0
    found = evaluate(run, tta="flip", keep_predictions=True).predictions
    loaded = load_run(run)
    test = load_splits(loaded.config.data, 0).test
    assert found is not None and test is not None
    inputs = torch.stack([loaded.transform(image) for image in test.fetch(range(len(test)))])
    with torch.inference_mode():
        wanted = (loaded.model(inputs).sigmoid() + loaded.model(inputs.flip(-1)).sigmoid()) / 2
    np.testing.assert_allclose(torch.from_numpy(found.logits).sigmoid().numpy(), wanted.numpy(), atol=1e-6)


def test_the_literal_has_all_views() -> None:
    """A new word would be the flip without saying so."""
    assert Tta.__args__ == ("none", "flip", "ten-crop")  # type: ignore[attr-defined]
