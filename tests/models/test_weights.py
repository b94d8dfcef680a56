"""Weights that a model begins from: which of a file's are loaded, adapted or left out, and files that are refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from accel_train.config.schema import Model
from accel_train.errors import UserError
from accel_train.models import create_model
from accel_train.models.weights import Weights, load_into, read_state

LETTERS = tuple("abcdefghij")


def model_of(name: str, classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    return create_model(Model(name=name), num_classes=classes, channels=channels, image_size=size)


def written(state: dict[str, Tensor], folder: Path) -> Path:
    path = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def load(model: nn.Module, file: Path, classes: Any = LETTERS, theirs: Any = None, channels: int = 3) -> str:
    return load_into(model, Weights(file, file.name, theirs), classes, channels)


@pytest.mark.parametrize("wrap", ["", "state_dict", "model", "model_ema"])
def test_a_file_of_other_programs_is_loaded_whole(tmp_path: Path, wrap: str) -> None:
    there, here = timm.create_model("test_resnet", num_classes=10), model_of("test_resnet")
    state = there.state_dict()
    # As DDP names them, in a checkpoint of a training script.
    prefixed = {f"module.{name}": value for name, value in state.items()}
    torch.save({wrap: prefixed, "epoch": 3} if wrap else prefixed, tmp_path / "model.pth.tar")
    text = load(here, tmp_path / "model.pth.tar")
    assert "last layer loaded: as many classes (10), which the file does not name" in text
    assert all(torch.equal(value, state[name]) for name, value in here.state_dict().items())


@pytest.mark.parametrize(
    ("theirs", "ours", "loaded", "said"),
    [
        (LETTERS, LETTERS, True, "last layer loaded: the same classes"),
        (LETTERS, LETTERS[::-1], True, "the same classes, in another order"),
        (LETTERS, (*LETTERS[:-1], "z"), False, "new last layer: other classes ('z' is not there)"),
        (LETTERS, LETTERS[:4], False, "new last layer: 10 classes there, 4 here"),
        (None, LETTERS[:4], False, "new last layer: 10 classes there, 4 here"),
    ],
)
def test_the_last_layer_is_loaded_for_the_same_classes_by_name(
    tmp_path: Path, theirs: Any, ours: tuple[str, ...], loaded: bool, said: str
) -> None:
    there, here = timm.create_model("test_resnet", num_classes=10), model_of("test_resnet", len(ours))
    fresh = here.fc.weight.clone()  # type: ignore[operator]
    text = load(here, written(there.state_dict(), tmp_path), ours, theirs)
    assert said in text
    assert torch.equal(here.conv1[0].weight, there.conv1[0].weight)  # type: ignore[index]
    if loaded:
        images = torch.randn(2, 3, 32, 32)
        rows = [LETTERS.index(name) for name in ours]
        torch.testing.assert_close(here.eval()(images), there.eval()(images)[:, rows])
        assert torch.equal(here.fc.weight, there.fc.weight[rows])  # type: ignore[arg-type]
    else:
        assert torch.equal(here.fc.weight, fresh)  # type: ignore[arg-type]


def test_a_transformer_takes_weights_of_another_image_size_and_of_colour_images(tmp_path: Path) -> None:
    there = timm.create_model("test_vit", num_classes=10, img_size=160)
    here = model_of("test_vit", channels=1, size=64)
    text = load(here, written(there.state_dict(), tmp_path), channels=1)
    assert "adapted to this size or these channels: patch_embed.proj.weight, pos_embed" in text
    timms = timm.layers.resample_abs_pos_embed(there.pos_embed, new_size=[4, 4], num_prefix_tokens=1)
    torch.testing.assert_close(here.pos_embed, timms)
    torch.testing.assert_close(here.patch_embed.proj.weight, there.patch_embed.proj.weight.sum(1, keepdim=True))


def test_a_first_layer_of_grey_images_is_new_for_colour_images(tmp_path: Path) -> None:
    there, here = model_of("test_resnet", channels=1), model_of("test_resnet")
    assert "new: conv1.0.weight" in load(here, written(there.state_dict(), tmp_path))


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torchvision/mobilenet_v3_small", "resnet18_cifar"])
def test_models_that_are_not_timms(tmp_path: Path, name: str) -> None:
    there, here = model_of(name, 10), model_of(name, 4)
    text = load(here, written(there.state_dict(), tmp_path), LETTERS[:4])
    assert "new last layer: 10 classes there, 4 here" in text
    unequal = {
        name
        for name, value in here.state_dict().items()
        if name not in there.state_dict()
        or (value.shape != there.state_dict()[name].shape or not torch.equal(value, there.state_dict()[name]))
    }
    assert {name.rpartition(".")[2] for name in unequal} == {"weight", "bias"}
    assert len(unequal) == 2


def test_torchvisions_transformer_of_another_size(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 16}
    there = torchvision.models.VisionTransformer(image_size=32, num_classes=10, **arguments)
    here = torchvision.models.VisionTransformer(image_size=48, num_classes=10, **arguments)
    assert "encoder.pos_embedding" in load(here, written(there.state_dict(), tmp_path))
    assert torch.equal(here.conv_proj.weight, there.conv_proj.weight)


def test_weights_of_another_model_are_refused_with_both_sides_names(tmp_path: Path) -> None:
    file = written(timm.create_model("test_vit").state_dict(), tmp_path)
    here = model_of("test_resnet")
    before = {name: value.clone() for name, value in here.state_dict().items()}
    with pytest.raises(UserError, match=r"another model: it has only 0% .* are \S+, .*; this model's are conv1\.0\."):
        load(here, file)
    assert all(torch.equal(value, before[name]) for name, value in here.state_dict().items())
    wide = written(timm.create_model("resnet34").state_dict(), tmp_path)
    with pytest.raises(UserError, match=r"conv1\.weight is \(64, 64, 3, 3\) there and \(64, 64, 1, 1\) here"):
        load(model_of("resnet50"), wide)


class Command:
    """Its pickle runs a command when it is loaded without weights_only."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"state_dict": Command(f"touch {mark}")}, tmp_path / "a.pth")
    (tmp_path / "b.pth").write_bytes(pickle.dumps(Command(f"touch {mark}")))
    with pytest.raises(UserError, match=r"a\.pth cannot be read: .* more than tensors.* save its state_dict as"):
        read_state(tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"b\.pth cannot be read"):
        read_state(tmp_path / "b.pth")
    assert not mark.exists()


def test_files_that_are_no_weights_are_one_line(tmp_path: Path) -> None:
    file = written({"a": torch.zeros(1000)}, tmp_path)
    content = file.read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(content[:-100])
    (tmp_path / "text.safetensors").write_text("These are not weights.")
    (tmp_path / "text.pth").write_text("These are not weights.")
    torch.save({"a": torch.zeros(1000)}, tmp_path / "whole.pth")
    (tmp_path / "torn.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:-500])
    torch.save({"epoch": 3}, tmp_path / "none.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "folder.pth").mkdir()
    os.mkfifo(tmp_path / "pipe.pth")
    (tmp_path / "a.txt").write_text("")
    for path in sorted(tmp_path.iterdir()):
        if path.name in ("weights.safetensors", "whole.pth"):
            assert list(read_state(path)) == ["a"]
            continue
        with pytest.raises(UserError) as caught:
            read_state(path)
        assert len(caught.value.messages) == 1 and "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
