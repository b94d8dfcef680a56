"""`accel-train export` of real runs, and of models of every kind with weights that were never trained."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from prepared import prepare
from safetensors.torch import load_file, save_file

from accel_train import cli
from accel_train.config.options import parse
from accel_train.config.schema import to_yaml
from accel_train.files import sha256
from accel_train.models.factory import create_model
from accel_train.records.model_info import ModelInfo
from accel_train.tools.load_run import load


@pytest.fixture
def digits(digits_run: Path, tmp_path: Path) -> Path:
    """A copy of the run of digits."""
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 12 small JPEGs of two classes."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for number in range(12):
        file = root / ("dark", "light")[number % 2] / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        noise = random.integers(0, 100, (9, 12, 3), dtype=np.uint8) + 120 * (number % 2)
        Image.fromarray(noise.astype(np.uint8)).resize((60 + 7 * number, 50), Image.Resampling.BICUBIC).save(file)
    return root


def run_of(folder: Path, photos: Path, name: str, size: int, *words: str, channels: int = 3) -> Path:
    """The folder of a run whose model has random weights, and the photos as its data."""
    run = folder / "run"
    run.mkdir(parents=True)
    data = f"--data.name folder --data.root {photos} --data.test-fraction 0.5 --data.channels {channels}".split()
    config = parse(["mnist_cnn", *data, "--model.name", name, "--model.image-size", str(size), *words])
    mean, std = (0.5, 0.4, 0.6)[:channels], (0.2, 0.3, 0.25)[:channels]
    info = ModelInfo(("dark", "light"), channels, size, None, mean, std)
    torch.manual_seed(0)
    model = create_model(config.model, num_classes=2, channels=channels, image_size=size, pretrained=False)
    save_file({key: tensor.clone() for key, tensor in model.state_dict().items()}, run / "model.safetensors")
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "model.json").write_text(info.to_json())
    return run


def exported(run: Path, format: str, *words: object) -> int:
    return cli.main(["export", str(run), "--format", format, *map(str, words)])


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def rules_in(folder: Path) -> dict[str, Any]:
    rules: dict[str, Any] = json.loads((folder / "preprocess.json").read_text())
    return rules


@pytest.mark.slow
def test_onnx_of_the_digits(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exported(digits, "onnx") == 0
    said = capsys.readouterr().out
    assert "ema.safetensors (EMA)" in said
    assert "loaded again: from 8 equal inputs the logits differ by at most" in said
    folder = digits / "export-onnx"
    assert files_in(folder) == {"model.onnx", "preprocess.json"}
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    rules = rules_in(folder)
    assert json.loads(session.get_modelmeta().custom_metadata_map["preprocess.json"]) == rules
    assert rules["classes"] == list("0123456789")
    run = load(digits)  # with the weights of the EMA, too
    for file in helpers.write_digits(digits / "images"):
        logits = session.run(["logits"], {"images": prepare(file, rules)[None]})[0]
        assert rules["classes"][logits.argmax()] == run.predict([file])[0].classes[0]
    for count in (1, 7):
        inputs = torch.randn(count, 1, 8, 8)
        found = session.run(["logits"], {"images": inputs.numpy()})[0]
        with torch.inference_mode():
            assert np.abs(run.model(inputs).numpy() - found).max() < 1e-3


def test_pt2_with_the_weights_of_the_model(digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exported(digits, "pt2", "--weights", "model", "--output", tmp_path / "there" / "net") == 0
    folder = tmp_path / "there" / "net"
    extra = {"preprocess.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=extra)
    assert json.loads(extra["preprocess.json"]) == rules_in(folder)
    model = load(digits).model
    model.load_state_dict(load_file(digits / "model.safetensors"))
    for count in (1, 5):
        inputs = torch.randn(count, 1, 8, 8)
        with torch.inference_mode():
            assert (program.module()(inputs) - model(inputs)).abs().max() < 1e-3

    (digits / "ema.safetensors").unlink()
    capsys.readouterr()
    assert exported(digits, "pt2", "--weights", "ema") == 2
    assert "has no EMA; use --weights model" in capsys.readouterr().err


def test_an_export_replaces_nothing(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = digits / "export-pt2"
    folder.mkdir()
    assert exported(digits, "pt2") == 0  # in an empty folder
    before = {path: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()
    assert exported(digits, "pt2", "--weights", "model") == 2
    assert f"{folder} is not empty (found model.pt2)" in capsys.readouterr().err
    assert exported(digits, "pt2", "--output", digits / "config.yaml") == 2
    assert "is a file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert not [path for path in digits.iterdir() if path.name.startswith(".")]


def test_what_is_not_timms_is_refused(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exported(digits, "timm") == 2
    assert "digits_cnn is not an architecture of timm's; use --format onnx or pt2." in capsys.readouterr().err
    assert not (digits / "export-timm").exists()


def test_a_timm_directory(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, photos, "test_resnet", 40, "--augment.resize", "50")
    assert exported(run, "timm", "--output", tmp_path / "net") == 0
    assert files_in(tmp_path / "net") == {"config.json", "model.safetensors", "preprocess.json"}
    model = timm.create_model(f"local-dir:{tmp_path / 'net'}", pretrained=True).eval()
    assert model.num_classes == 2
    assert model.pretrained_cfg["label_names"] == ["dark", "light"]
    transform = timm.data.create_transform(**timm.data.resolve_data_config(model.pretrained_cfg))
    ours, files = load(run), sorted(photos.rglob("*.jpg"))
    for file in files:
        inputs = transform(Image.open(file).convert("RGB"))
        assert np.abs(inputs.numpy() - prepare(file, rules_in(tmp_path / "net"))).max() < 1e-5
        with torch.inference_mode():
            assert (model(inputs[None]) - ours.model(inputs[None])).abs().max() < 1e-3
    assert json.loads((tmp_path / "net" / "config.json").read_text())["architecture"] == "test_resnet"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "channels", "words"),
    [
        ("test_vit", 64, 3, ("--model.gradient-checkpointing", "true")),
        ("test_efficientnet", 32, 1, ("--model.freeze-body", "true")),
    ],
)
def test_what_a_timm_directory_keeps_of_the_model(
    name: str, size: int, channels: int, words: tuple[str, ...], photos: Path, tmp_path: Path
) -> None:
    run = run_of(tmp_path, photos, name, size, *words, channels=channels)
    assert exported(run, "timm") == 0
    model = timm.create_model(f"local-dir:{run / 'export-timm'}", pretrained=True).eval()
    inputs = torch.randn(3, channels, size, size)
    with torch.inference_mode():
        assert (model(inputs) - load(run).model(inputs)).abs().max() < 1e-3


def test_torchvisions_resnets_are_timms(photos: Path, tmp_path: Path) -> None:
    """The few lines of docs/export.md, in place of an export."""
    run = run_of(tmp_path, photos, "torchvision/resnet18", 32)
    assert exported(run, "timm") == 2
    page = (helpers.ROOT / "docs" / "export.md").read_text()
    (code,) = re.findall(r"```python\n(# to_timm\.py\n.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code.replace("runs/mine", str(run)).replace("num_classes=10", "num_classes=2"), found)
    inputs = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        assert (found["model"].eval()(inputs) - load(run).model(inputs)).abs().max() < 1e-3


CODE = """
import random

import torch
from torch import nn


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, images):
        return images.mean((1, 2, 3))[:, None] * self.scale + random.random()


def drawn(num_classes, in_chans, image_size):
    return Random()
"""


@pytest.fixture
def own(photos: Path, tmp_path: Path) -> Path:
    """A file with models of a user's own."""
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


def own_run(folder: Path, photos: Path, code: Path, function: str) -> Path:
    """The folder of a run with the user's own model."""
    run = run_of(folder, photos, f"{code}:{function}", 24)
    (run / "code").mkdir()
    shutil.copyfile(code, run / "code" / "own.py")
    (run / "code.json").write_text(json.dumps({"model.name": {"kept": "code/own.py", "sha256": sha256(code)}}))
    info = json.loads((run / "model.json").read_text())
    info |= {"mean": [0.5] * 3, "std": [0.25] * 3}
    (run / "model.json").write_text(json.dumps(info))
    return run


def test_an_export_that_differs_is_not_put_in_place(
    photos: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's random numbers become a constant in an exported program."""
    run = own_run(tmp_path, photos, own, "drawn")
    assert exported(run, "pt2", "--trust-code", "true") == 1
    said = capsys.readouterr()
    assert "from equal inputs the logits differ by up to" in said.err
    assert "The export was not written" in said.err
    assert not [*run.glob("*export*")]


def test_a_model_that_torch_cannot_export(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = tmp_path / "own.py"
    code.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.line = nn.Linear(3, 2)\n\n    def forward(self, images):\n"
        "        means = images.mean((2, 3))\n        return self.line(means * 2 if means.sum() > 1 else means)\n\n\n"
        "def net(num_classes, in_chans, image_size):\n    return Net()\n"
    )
    run = own_run(tmp_path, photos, code, "net")
    assert exported(run, "pt2", "--trust-code", "true") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "--format pt2: this model cannot be exported so (" in errors[0]
    assert not (run / "export-pt2").exists()


def test_missing_packages_and_options(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(digits)]) == 2
    assert "--format is missing; choose timm, onnx or pt2." in capsys.readouterr().err
    script = (
        "import sys; sys.modules['onnxruntime'] = None; from accel_train.cli import main; "
        f"sys.exit(main(['export', {str(digits)!r}, '--format', 'onnx']))"
    )
    ran = helpers.python("-c", script)
    assert ran.returncode == 2
    needed = "onnx, onnxruntime and onnxscript: pip install 'accel-train[export]'."
    assert ran.stderr == f"accel-train: error: --format onnx needs {needed}\n"


@pytest.mark.slow
def test_several_labels_and_tensors_of_ones_own(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, photos, "test_resnet", 32)
    info = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(info | {"multi_label": True}))
    assert exported(run, "pt2") == 0
    assert rules_in(run / "export-pt2")["probabilities"] == "sigmoid"

    (run / "model.json").write_text(json.dumps(info | {"full_scale": 1}))
    assert exported(run, "onnx") == 0
    assert rules_in(run / "export-onnx")["steps"] is None
