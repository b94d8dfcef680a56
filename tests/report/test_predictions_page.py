"""`accel-train predict RUN IMAGE … --page FILE.html`: images with their most probable classes."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from accel_train import cli
from accel_train.analysis.inference.calibrated import Calibration
from accel_train.analysis.inference.preprocessing import Preprocessing
from accel_train.analysis.loaded_run import LoadedRun
from accel_train.api import predict
from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.report.predictions import predictions


class Brightness(nn.Module):
    """Answers by the mean of the image: dark, grey or bright."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.mean((1, 2, 3))
        return torch.stack([5 - 10 * mean, torch.zeros_like(mean), 10 * mean - 5], 1)


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    """A run that was not trained; its images have 300 pixels, more than the page shows."""
    info = ModelInfo(("<b>dark", "grey", "bright"), 3, 300, None, (0.0,) * 3, (1.0,) * 3)
    config = Config()
    preprocessing = Preprocessing(info, config.augment)
    weights = tmp_path / "model.safetensors"
    return LoadedRun(
        tmp_path / "run", config, info, Brightness(), weights, preprocessing, Calibration(None, "uncalibrated")
    )


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """A bright, a dark and a damaged image, whose names are markup, of two lines, and not UTF-8."""
    folder = tmp_path / "images"
    folder.mkdir()
    paths = [folder / "<script>.png", folder / "two\nlines.png", folder / "b\udcff.png"]
    for path, value in zip(paths[:2], (250, 5), strict=True):
        Image.new("RGB", (400, 320), (value,) * 3).save(path)
    paths[2].write_bytes(b"no image")
    return paths


def figures(page: Path) -> list[str]:
    return re.findall(r"<figure>.*?</figure>", page.read_text(encoding="utf-8"), re.DOTALL)


def test_each_image_has_its_classes(run: LoadedRun, images: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = predict(run, images, page=page)
    assert found == predict(run, images)
    bright, dark, damaged = figures(page)
    for figure, prediction, value in ((bright, found[0], 250), (dark, found[1], 5)):
        shares = [float(share) for share in re.findall(r"--share: ([-\de.]+)", figure)]
        assert shares == list(prediction.probabilities)
        uri = re.search(r'src="data:image/jpeg;base64,([^"]*)"', figure)
        assert uri
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri[1]))))
        assert pixels.shape == (predictions.SIDE, predictions.SIDE, 3) and abs(int(pixels.mean()) - value) <= 1
    assert re.findall(r"<li[^>]*>(\S+) <span>([\d.%]+)", bright)[0] == ("bright", "99.2%")
    assert re.findall(r"<li[^>]*>(\S+) <span>([\d.%]+)", dark)[0] == ("&lt;b&gt;dark", "99.2%")
    assert "<img" not in damaged and "cannot be read" in damaged
    text = page.read_text(encoding="utf-8")
    assert "&lt;script&gt;.png" in bright and r"two\nlines.png" in dark and r"b\udcff.png" in damaged
    assert text.count("<script>") == 1  # the page's own
    assert "1 of 3 images cannot be read." in text and "http" not in text


def test_calibrated_probabilities_are_beside_them(run: LoadedRun, images: list[Path], tmp_path: Path) -> None:
    run = dataclasses.replace(run, calibration=Calibration(5.0, "calibrated: divided by 5"))
    (found,) = predict(run, images[:1], page=tmp_path / "page.html")
    (figure,) = figures(tmp_path / "page.html")
    assert re.findall(r'"soft">([\d.]+%)', figure) == [f"{value:.1%}" for value in found.calibrated]
    assert found.calibrated[0] < found.probabilities[0] - 0.2


def test_no_more_than_the_limit_and_the_page_says_so(
    run: LoadedRun, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "SHOWN", 2)
    assert len(predict(run, images[:1] * 5, page=tmp_path / "page.html")) == 5
    assert len(figures(tmp_path / "page.html")) == 2
    assert "The first 2 of 5 images" in (tmp_path / "page.html").read_text()
    predict(run, images[:1] * 2, page=tmp_path / "page.html")
    assert "The first" not in (tmp_path / "page.html").read_text()


def test_an_image_without_a_class(run: LoadedRun, images: list[Path], tmp_path: Path) -> None:
    run = dataclasses.replace(run, info=dataclasses.replace(run.info, multi_label=True))
    predict(run, images[:1], threshold=1.0, page=tmp_path / "page.html")
    assert ">none</li>" in figures(tmp_path / "page.html")[0]


def test_the_page_is_there_when_all_images_are_done(run: LoadedRun, images: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("the earlier one")
    answers = predictions.keeping_page(iter(predict(run, images)), run, page)
    next(answers)
    assert page.read_text() == "the earlier one"
    list(answers)
    assert len(figures(page)) == 3
    with pytest.raises(UserError, match="--page"):
        predict(run, images, page=tmp_path)  # a folder


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    pipe = signal.getsignal(signal.SIGPIPE)  # predict lets it end the program
    yield
    signal.signal(signal.SIGPIPE, pipe)
    helpers.forget_accelerate()


@pytest.mark.usefixtures("fresh_accelerate")
def test_from_the_command_line(
    digits_run: Path, images: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(digits_run), *map(str, images[:2])]
    assert cli.main([*words, "--page", "page.txt"]) == 2
    page, table = tmp_path / "page.html", tmp_path / "found.csv"
    capsys.readouterr()
    assert cli.main([*words, "--page", str(page)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3 and f"page: {page}" in err  # the table has one class of each image
    assert [figure.count("<li") for figure in figures(page)] == [5, 5]
    assert 'src="data:image/png;' in figures(page)[0]  # without loss, and its pixels are to be seen
    assert 'figure img[src^="data:image/png"] { image-rendering: pixelated; }' in page.read_text()
    page.unlink()
    helpers.forget_accelerate()
    assert cli.main([*words, str(images[2]), "--page", str(page), "--output", str(table), "--top-k", "2"]) == 1
    assert len(table.read_text(errors="surrogateescape").splitlines()) == 1 + 2 * 3 + 1  # a name has two lines
    assert [figure.count("<li") for figure in figures(page)] == [2, 2, 0]
