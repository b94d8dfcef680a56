"""`accel-train evaluate --model.name …`: published weights on data whose classes they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models import save_for_hf

from accel_train import cli
from accel_train.analysis.predictions import read_predictions
from accel_train.analysis.published import describe, match_classes
from accel_train.config.schema import Model
from accel_train.errors import UserError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

CLASSES = ["zebra", "cat", "Irish setter", "dog", "cow"]


@pytest.fixture(scope="module", params=["bilinear", "bicubic"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A small model of timm's with random weights, as its save_for_hf writes it."""
    interpolation = request.param
    folder = tmp_path_factory.mktemp("published") / "net"
    torch.manual_seed(0)
    net = timm.create_model("test_resnet", num_classes=len(CLASSES))
    config = {"label_names": CLASSES, "crop_pct": 0.8, "input_size": [3, 96, 96], "interpolation": interpolation}
    save_for_hf(net, folder, model_config=config | {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]})
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "test"):
        for number, name in enumerate(("Cat", "dog", "irish_setter")):
            (root / split / name).mkdir(parents=True)
            for image in range(6):
                pixels = np.random.default_rng(image + 10 * number).integers(
                    0, 256, (70 + image, 90, 3), dtype=np.uint8
                )
                Image.fromarray(pixels).resize((200, 140 + image)).save(root / split / name / f"{image}.png")
    return root


def words(model: Path, photos: Path, *more: str) -> list[str]:
    data = ["--data.name", "folder", "--data.root", str(photos), "--data.workers", "0"]
    return ["evaluate", "--model.name", f"local-dir:{model}", *data, *more]


@pytest.mark.slow
def test_the_logits_are_those_of_timm(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--predictions", str(tmp_path / "p.npz"), "--output", str(tmp_path / "figures.json")]
    assert cli.main(words(model, photos, *files)) == 0
    out = capsys.readouterr().out
    assert "The data's 3 classes are all among the model's 5, by name; the logits of the other 2 are left out." in out
    net = timm.create_model(f"local-dir:{model}", pretrained=True).eval()
    transform = create_transform(**resolve_data_config({}, model=net, use_test_size=True))
    found = read_predictions(tmp_path / "p.npz")
    assert found.classes == ("Cat", "dog", "irish_setter") and found.paths is not None
    with torch.inference_mode():
        theirs = torch.cat([net(transform(Image.open(path).convert("RGB"))[None]) for path in found.paths])
    # The same resizing but for Pillow's rounding to whole pixel values.
    np.testing.assert_allclose(found.logits, theirs[:, [1, 3, 2]].numpy(), atol=0.02)
    # At another size, with the publisher's crop_pct.
    assert cli.main(words(model, photos, *files[:2], "--model.eval-image-size", "64")) == 0
    smaller = read_predictions(tmp_path / "p.npz").logits
    small = create_transform(**{**resolve_data_config({}, model=net, use_test_size=True), "input_size": (3, 64, 64)})
    with torch.inference_mode():
        theirs = torch.cat([net(small(Image.open(path).convert("RGB"))[None]) for path in found.paths])
    np.testing.assert_allclose(smaller, theirs[:, [1, 3, 2]].numpy(), atol=0.02)
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["model"]["accuracy"] == (found.logits.argmax(1) == found.labels).mean()
    assert figures["model"]["weights"] == f"local-dir:{model}"


def told(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    assert cli.main(line) == 2
    (message,) = capsys.readouterr().err.splitlines()
    return message.removeprefix("accel-train: error: ")


def test_classes_that_do_not_meet_are_one_line(
    model: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = told(capsys, ["evaluate", "--model.name", f"local-dir:{model}", "--data.name", "digits"])
    assert message.startswith("10 of the data's 10 classes are none of the 5 of local-dir:")
    assert "such as 'zebra': '0', '1', '2', '3', '4' and 5 more." in message
    with pytest.raises(UserError, match="classes 'cat' and 'Cat' of the data are both 'cat' of net"):
        match_classes(["cat", "Cat"], [frozenset({"cat"})], ["cat"], "net")
    with pytest.raises(UserError, match="class 'crane' of the data may be n1 and n2 of net"):
        match_classes(["crane"], [frozenset({"crane", "n1"}), frozenset({"crane", "n2"})], ["n1", "n2"], "net")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--model.name", "resnet18"],
            "without a run, only published weights can be evaluated; add --model.pretrained",
        ),
        (["--model.name", "mnist_cnn", "--model.pretrained", "true"], "mnist_cnn: has no published weights"),
        (["--model.name", "resnt18", "--model.pretrained", "true"], "unknown model 'resnt18'. Did you mean"),
        (["--model.name", "resnet18", "--predictions", "p.txt"], "expected a name that ends in .npz or .parquet"),
    ],
)
def test_what_is_not_published_is_told(capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert message in told(capsys, ["evaluate", *more])


def test_imagenet_is_known_by_id_and_by_name() -> None:
    published = describe(Model(name="resnet18", pretrained=True))
    assert len(published.classes) == 1000 and (published.image_size, published.crop_fraction) == (288, 1.0)
    columns = match_classes(["tench", "n01443537", "great_white_shark"], published.classes, published.shown, "resnet18")
    assert columns == [0, 1, 2]
    theirs = describe(Model(name="torchvision/resnet18", pretrained=True))
    assert (theirs.image_size, theirs.crop_fraction, theirs.interpolation) == (224, 0.875, "bilinear")
    assert match_classes(["tench", "goldfish"], theirs.classes, theirs.shown, "torchvision/resnet18") == [0, 1]
