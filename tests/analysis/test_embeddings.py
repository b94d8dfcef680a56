"""Embeddings: the values before the last layer of any model, and those of another layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from accel_train import api, cli
from accel_train.analysis.inference.embeddings import Embeddings
from accel_train.config.schema import Model
from accel_train.errors import UserError
from accel_train.models import create_model


def embedded(model: nn.Module, images: torch.Tensor, layer: str | None = None) -> torch.Tensor:
    with Embeddings(model.eval(), layer) as embeddings, torch.no_grad():
        model(images)
        return torch.from_numpy(embeddings.take(len(images)))


def made(name: str, size: int) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    model = create_model(Model(name=name), num_classes=5, channels=3, image_size=size).eval()
    return cast(Any, model), torch.randn(2, 3, size, size)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "test_resnet",
        "test_vit",
        "swin_s3_tiny_224",
        "deit_tiny_distilled_patch16_224",
        "test_convnext",
        "test_mambaout",
    ],
)
def test_they_are_what_timm_has_before_the_logits(name: str) -> None:
    model, images = made(name, 224 if "224" in name else 160 if name == "test_vit" else 64)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(embedded(model, images), expected)


def test_of_torchvisions_models_and_ours() -> None:
    model, images = made("torchvision/resnet18", 64)
    found = embedded(model, images)
    torch.testing.assert_close(model.fc(found), model(images))
    model, images = made("torchvision/squeezenet1_1", 64)  # whose last layer is a convolution
    found = embedded(model, images)
    torch.testing.assert_close(found, model.features(images).mean((2, 3)))
    model, images = made("mnist_cnn", 28)
    assert embedded(model, images).shape == (2, 128)


@pytest.mark.ci
def test_a_layer_that_is_named_has_the_mean_over_the_image() -> None:
    model, images = made("test_resnet", 64)
    with torch.no_grad():
        expected = model.layer1(model.maxpool(model.act1(model.bn1(model.conv1(images))))).mean((2, 3))
    torch.testing.assert_close(embedded(model, images, "layer1"), expected)
    model, images = made("swin_s3_tiny_224", 224)  # [b, H, W, features]
    assert embedded(model, images, "layers.0").shape == (2, 96)
    model, images = made("test_vit", 160)  # [b, tokens, features]
    assert embedded(model, images, "blocks.0").shape == (2, 64)
    with pytest.raises(UserError, match=r"--layer: the model has no layer 'block\.0'\. Did you mean 'blocks\.0'"):
        Embeddings(model, "block.0")


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.fc = nn.Identity(), nn.Linear(3, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, _ = self.both((images.mean((2, 3)), images))
        return cast(torch.Tensor, self.fc(mean))


def test_a_layer_without_one_tensor_and_no_hook_remains() -> None:
    model = TwoOutputs()
    with pytest.raises(UserError, match="--layer both: it does not compute one tensor of features"):
        embedded(model, torch.rand(2, 3, 4, 4), "both")
    assert not model.both._forward_hooks and not model.fc._forward_pre_hooks


def test_what_the_next_layer_overwrites_is_kept() -> None:
    model, images = made("torchvision/resnet18", 64)
    assert model.relu.inplace
    with torch.no_grad():
        expected = model.bn1(model.conv1(images)).mean((2, 3))
    assert (expected < 0).any()
    torch.testing.assert_close(embedded(model, images, "bn1"), expected)


@pytest.mark.ci
def test_a_layer_that_is_called_with_windows_or_again_with_other_features() -> None:
    model, images = made("swin_s3_tiny_224", 224)  # 64 windows of each image
    with pytest.raises(UserError, match="attn: it does not compute one tensor of features for each image"):
        embedded(model, images, "layers.0.blocks.0.attn")
    model, images = made("torchvision/resnet50", 64)  # its blocks have one ReLU for all their convolutions
    with pytest.raises(UserError, match=r"--layer layer4\.2\.relu: it has other features each time"):
        embedded(model, images, "layer4.2.relu")


def test_predict_writes_a_row_for_each_image(
    digits_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        Image.new("L", (8, 8), 60 * number).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_bytes(b"damaged")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    out = tmp_path / "out.npy"
    words = ["predict", str(digits_run), *map(str, files), "--embeddings", str(out), "--batch-size", "2"]
    assert cli.main(words) == 1  # one cannot be read
    assert "3 rows of" in capsys.readouterr().err
    rows = np.load(out)
    assert rows.dtype == np.float32 and np.isnan(rows[1]).all() and not np.isnan(rows[[0, 2]]).any()
    found = api.predict(digits_run, files, embeddings=True)
    assert found[1].embedding is None
    for number in (0, 2):
        embedding = found[number].embedding
        assert embedding is not None
        np.testing.assert_allclose(embedding, rows[number], atol=1e-6)
    assert api.predict(digits_run, files)[0].embedding is None
    with pytest.raises(UserError, match="they are of one view of an image; leave out --tta flip"):
        api.predict(digits_run, files, embeddings=True, tta="flip")
    for words, message in (
        (["--embeddings", "x.csv"], "--embeddings: expected a name that ends in .npy"),
        (["--layer", "fc"], "--layer: it is of --embeddings"),
    ):
        assert cli.main(["predict", str(digits_run), str(files[0]), *words]) == 2
        assert message in capsys.readouterr().err


def test_nothing_readable_is_an_empty_table(digits_run: Path, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"damaged")
    assert cli.main(["predict", str(digits_run), str(tmp_path), "--embeddings", str(tmp_path / "out.npy")]) == 1
    assert np.load(tmp_path / "out.npy").shape == (1, 0)
