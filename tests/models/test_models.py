"""The factory: names, sizes, channels, published weights, frozen bodies."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from accel_train.config.schema import Model
from accel_train.errors import UserError
from accel_train.models import (
    classifier_names,
    create_model,
    input_size,
    pretrained_normalization,
)
from accel_train.models.factory import AUXILIARY

OWN = {
    "digits_cnn": 8,
    "mnist_cnn": 28,
    "lenet": 28,
    "alexnet_bn": 64,
    "resnet9": 32,
    "resnet18_cifar": 32,
    "vit_s16_plain": 32,
}


def make(name: str, *, num_classes: int = 7, channels: int = 3, image_size: int = 64, **options: Any) -> nn.Module:
    settings = Model(name=name, **options)  # type: ignore[arg-type]
    return create_model(settings, num_classes=num_classes, channels=channels, image_size=image_size)


def check_builds(name: str, channels: int, image_size: int) -> None:
    model = make(name, channels=channels, image_size=image_size)
    model.train()
    logits = model(torch.randn(2, channels, image_size, image_size))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(module for module in classifier_names(model))
    for head in classifier_names(model):
        assert list(model.get_submodule(head).parameters()), head


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OWN)
def test_own_nets(name: str, channels: int) -> None:
    check_builds(name, channels, OWN[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*torchvision.models.list_models(module=torchvision.models)} - {*AUXILIARY}))
def test_every_torchvision_model(name: str) -> None:
    if any(big in name for big in ("_h_14", "_128gf", "_l_16", "_l_32")):
        pytest.skip("more than 300 million parameters")
    check_builds(f"torchvision/{name}", 1, 224 if "vit" in name else 96)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20))
def test_every_twentieth_timm_model_builds(start: int) -> None:
    # In 20 tests about 70 of timm's models, at their own size where they have one.
    names = [
        name for name in timm.list_models() if not any(big in name for big in ("giant", "huge", "gigantic", "_7b"))
    ]
    for name in names[start * 20 :: 400]:
        settings = Model(name=name)
        size = input_size(settings, 128)
        if size > 288:
            continue
        check_builds(name, 1 if len(name) % 2 else 3, size)


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_mnist_cnn_is_the_net_of_the_example() -> None:
    # 320 + 18 496 + 1 179 776 + 1 290, as the example's print-out has it
    assert parameter_count(make("mnist_cnn", num_classes=10, channels=1, image_size=28)) == 1_199_882


def test_lenet_has_the_layers_of_the_paper_with_more_channels() -> None:
    # Convolutions 16 * 26 and 32 * (16 * 25 + 1); 32 channels of 4x4 to 120, 84 and 10
    assert parameter_count(make("lenet", num_classes=10, channels=1, image_size=28)) == 416 + 12_832 + 61_560 + 11_014


def test_vit_s16_plain_is_the_net_of_the_paper() -> None:
    model = make("vit_s16_plain", num_classes=1000, image_size=224)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # A block: attention 4 * 384^2 + 4 * 384, MLP 8 * 384^2 + 5 * 384, two norms 4 * 384; then patches, norm, head.
    block = 12 * 384**2 + 13 * 384
    assert trained == 12 * block + (768 * 384 + 384) + 2 * 384 + (384 * 1000 + 1000)
    positions = model.pos_embed
    assert isinstance(positions, nn.Parameter)
    assert positions.shape == (1, 196, 384)
    assert not positions.requires_grad
    assert positions[0].unique(dim=0).shape[0] == 196  # each place has its own
    for part in model.get_submodule("blocks.0.attn.qkv").weight.chunk(3):  # type: ignore[operator]
        bound = (6 / (384 + 384)) ** 0.5  # Glorot's, of each of the three layers by itself, as in big_vision
        assert 0.99 * bound < part.abs().max().item() <= bound * (1 + 1e-6)
    assert model(torch.randn(2, 3, 224, 224)).abs().max() == 0  # the head starts at zero, as in big_vision


def test_resnet18_cifar_keeps_the_resolution() -> None:
    model = make("resnet18_cifar", num_classes=10, image_size=32)
    for convolution in (module for module in model.modules() if isinstance(module, nn.Conv2d)):  # PyTorch's own draw
        bound = convolution.weight[0].numel() ** -0.5
        assert 0.9 * bound < convolution.weight.abs().max().item() <= bound * (1 + 1e-6)  # float32
    assert parameter_count(model) == 11_173_962  # as pytorch-cifar's ResNet18
    seen = []
    model.get_submodule("layer4").register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    model(torch.zeros(1, 3, 32, 32))
    assert seen == [4]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnt18", ["resnet18", "resnet18d"]),
        ("squeeznet1_0", ["torchvision/squeezenet1_0"]),
        ("torchvision/resnet19", ["torchvision/resnet18"]),
        ("mnist_cn", ["mnist_cnn"]),
    ],
)
def test_an_unknown_name_gets_the_five_nearest(name: str, expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make(name)
    message = str(caught.value)
    assert "\n" not in message
    assert all(f"'{item}'" in message for item in expected)
    assert message.partition("Did you mean")[2].partition("?")[0].count("'") == 10


@pytest.mark.parametrize(
    ("settings", "image_size", "needed"),
    [
        ({"name": "resnet18.no_such_tag"}, 32, "resnet18.a1_in1k"),
        ({"name": "mnist_cnn", "pretrained": True}, 28, "no published weights"),
        ({"name": "mnist_cnn", "drop_path": 0.1}, 28, "model.drop_path"),
        ({"name": "torchvision/resnet18", "dropout": 0.1}, 32, "model.dropout"),
        ({"name": "torchvision/convnext_tiny", "dropout": 0.1}, 64, "model.dropout"),
        ({"name": "torchvision/mobilenet_v3_small", "drop_path": 0.1}, 64, "model.drop_path"),
        ({"name": "torchvision/swin_t", "drop_path": 0.1}, 64, "model.drop_path"),
        ({"name": "torchvision/mobilenet_v3_small", "kwargs": '{"depth": 3}'}, 64, "model.kwargs"),
        ({"name": "torchvision/resnet18", "gradient_checkpointing": True}, 32, "gradient_checkpointing"),
        ({"name": "test_byobnet", "gradient_checkpointing": True}, 32, None),
        ({"name": "inception_v3"}, 28, "28x28"),
        ({"name": "vit_tiny_patch16_224"}, 8, "8x8"),
        ({"name": "torchvision/vit_b_16"}, 33, "33"),
        ({"name": "vit_s16_plain"}, 40, "take 32"),
        ({"name": "mnist_cnn"}, 3, "3x3"),
        ({"name": "torchvision/maxvit_t"}, 64, "64"),
    ],
)
def test_what_a_model_cannot_do_is_one_line(settings: dict[str, object], image_size: int, needed: str | None) -> None:
    if needed is None:
        make(image_size=image_size, **settings)  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=needed) as caught:
        make(image_size=image_size, **settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert str(settings["name"]).partition(".")[0] in str(caught.value)


def test_dropout_and_drop_path_reach_the_model() -> None:
    assert make("mnist_cnn", image_size=28, dropout=0.2).get_submodule("9").p == 0.2
    assert make("resnet18", image_size=32, dropout=0.3).drop_rate == 0.3
    assert make("torchvision/mobilenet_v2", image_size=32, dropout=0.4).get_submodule("classifier.0").p == 0.4
    model = make("convnext_atto", image_size=64, drop_path=0.5)
    assert max(getattr(module, "drop_prob", 0) or 0 for module in model.modules()) == 0.5


def test_arguments_that_torchvisions_functions_take_themselves() -> None:
    model = make("torchvision/mobilenet_v3_small", image_size=64, kwargs='{"width_mult": 0.5, "dropout": 0.3}')
    assert model.get_submodule("classifier.2").p == 0.3


@pytest.mark.parametrize(
    ("settings", "native", "expected"),
    [
        ({"name": "resnet18"}, 32, 32),
        ({"name": "resnet18"}, None, 224),
        ({"name": "resnet18", "image_size": 64}, 32, 64),
        ({"name": "resnet18", "pretrained": True}, 32, 224),
        ({"name": "resnet18", "pretrained": True, "image_size": 96}, 32, 96),
        ({"name": "vit_small_patch16_384"}, 32, 384),
        ({"name": "vit_small_patch16_384"}, None, 384),
        ({"name": "torchvision/vit_b_16"}, 32, 224),
        ({"name": "torchvision/vit_h_14", "pretrained": True}, None, 518),
        ({"name": "torchvision/resnet50", "pretrained": True}, None, 224),
        ({"name": "torchvision/resnet50"}, 28, 28),
        ({"name": "digits_cnn"}, 8, 8),
        ({"name": "alexnet_bn"}, None, 224),
    ],
)
def test_input_size(settings: dict[str, object], native: int | None, expected: int) -> None:
    assert input_size(Model(**settings), native) == expected  # type: ignore[arg-type]


def test_pretrained_normalization() -> None:
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert pretrained_normalization(Model(name="resnet18")) is None
    assert pretrained_normalization(Model(name="resnet18", pretrained=True)) == imagenet
    assert pretrained_normalization(Model(name="torchvision/resnet18", pretrained=True)) == imagenet
    half = pretrained_normalization(Model(name="vit_small_patch16_224.augreg_in21k_ft_in1k", pretrained=True))
    assert half == ((0.5,) * 3, (0.5,) * 3)


def cache_torchvision(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str = "DEFAULT"
) -> dict[str, torch.Tensor]:
    """Put weights where torchvision looks for those that it has downloaded; they are drawn, not trained."""
    weights = torchvision.models.get_model_weights(name)[which]
    state: dict[str, torch.Tensor] = torchvision.models.get_model(name).state_dict()
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / weights.url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return state


def test_published_torchvision_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = cache_torchvision("resnet18", monkeypatch, tmp_path)
    same = make("torchvision/resnet18", num_classes=1000, pretrained=True).state_dict()
    assert all(torch.equal(same[key], state[key]) for key in state)

    other = make("torchvision/resnet18", num_classes=7, channels=1, pretrained=True).state_dict()
    torch.testing.assert_close(other["conv1.weight"], state["conv1.weight"].sum(1, keepdim=True))
    assert torch.equal(other["layer4.1.conv2.weight"], state["layer4.1.conv2.weight"])
    assert other["fc.weight"].shape == (7, 512)


@pytest.mark.ci
def test_the_name_says_which_weights_of_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    states = {
        which: cache_torchvision("resnet50", monkeypatch, tmp_path, which) for which in ("IMAGENET1K_V1", "DEFAULT")
    }
    for name, which in (("", "DEFAULT"), (".IMAGENET1K_V1", "IMAGENET1K_V1"), (".IMAGENET1K_V2", "DEFAULT")):
        made = make(f"torchvision/resnet50{name}", num_classes=7, pretrained=True).state_dict()
        assert torch.equal(made["layer4.2.conv3.weight"], states[which]["layer4.2.conv3.weight"])
    swag = Model(name="torchvision/vit_b_16.IMAGENET1K_SWAG_E2E_V1", pretrained=True)
    assert input_size(swag, None) == 384  # its own, and not the 224 of the default ones
    assert pretrained_normalization(swag) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    for pretrained in (True, False):
        typed = Model(name="torchvision/resnet50.IMAGENET1K_V3", pretrained=pretrained)
        with pytest.raises(UserError, match=r"no weights 'IMAGENET1K_V3'\. Did you mean '?IMAGENET1K_V[12]"):
            create_model(typed, num_classes=7, channels=3, image_size=64)


def test_a_later_model_has_what_timm_gives_only_with_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm.models._builder, "load_pretrained", lambda *_, **__: None)
    conditional = re.compile(r"if pretrained:\n")  # arguments beside the weights
    functions = {name: timm.model_entrypoint(name) for name in timm.list_models()}
    own = [name for name, function in functions.items() if conditional.search(inspect.getsource(function))]
    assert own == ["fbnetc_100"]
    for name in own:
        theirs = timm.create_model(name, pretrained=True)
        assert {module.eps for module in make(name).modules() if hasattr(module, "eps")} == {
            module.eps for module in theirs.modules() if hasattr(module, "eps")
        }


@pytest.mark.ci
def test_published_weights_of_another_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = cache_torchvision("vit_b_32", monkeypatch, tmp_path)
    made = make("torchvision/vit_b_32", image_size=64, pretrained=True).state_dict()
    assert made["encoder.pos_embedding"].shape == (1, 5, 768)
    assert torch.equal(made["conv_proj.weight"], state["conv_proj.weight"])


@pytest.mark.slow
def test_no_network_is_one_line_and_imports_are_late(tmp_path: Path) -> None:
    # In a process of its own: the caches' places are read when the libraries are imported. The proxy refuses at once.
    program = """
import sys
from accel_train import models
from accel_train.config.schema import Model
from accel_train.errors import UserError

print("IMPORTED", sorted({"timm", "torchvision"} & set(sys.modules)))
for name in ("resnet18", "torchvision/resnet18"):
    try:
        models.create_model(Model(name=name, pretrained=True), num_classes=2, channels=3, image_size=64)
    except UserError as error:
        print("ERROR", error)
    settings = Model(name=name, pretrained=True)
    models.create_model(settings, num_classes=2, channels=3, image_size=64, pretrained=False)
"""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "TORCH_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    imported, theirs, torchvisions = [line for line in done.stdout.splitlines() if line.startswith(("IMP", "ERR"))]
    assert imported == "IMPORTED []"
    assert "weights of resnet18 could not be fetched" in theirs
    assert theirs.endswith("such as on the login node: hf download timm/resnet18.a1_in1k")
    assert "weights of torchvision/resnet18 could not be fetched" in torchvisions
    assert "get_model('resnet18', weights='DEFAULT')" in torchvisions
