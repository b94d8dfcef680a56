"""Real runs that begin from weights: of a file that timm wrote, and of another run."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import helpers
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from accel_train.errors import UserError
from accel_train.records.model_info import read_model_info
from accel_train.run.start import find_file

NET = ("digits", "--data.train-limit", 96, "--batch-size", 32, "--optim.lr", 0, "--epochs", 1)
"""A run that learns nothing: its weights are those that it began from."""
RESNET = (*NET, "--model.name", "test_resnet", "--model.image-size", 32)


def resnet(classes: int = 10) -> Any:
    torch.manual_seed(3)
    return timm.create_model("test_resnet.r160_in1k", num_classes=classes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.pth"
    torch.save(resnet(7).state_dict(), path)
    return path


def refused(ended: Any, message: str) -> None:
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert message in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.count("accel-train: error:") == 1, ended.stderr


@pytest.mark.slow
def test_a_run_needs_its_file_only_once(tmp_path: Path, file: Path) -> None:
    """On two processes; then the file is gone, comes back with other content, or lies elsewhere."""
    run, copy = tmp_path / "run", tmp_path / "copy.pth"
    shutil.copy(file, copy)
    begun = helpers.run(*RESNET, "--model.weights", copy, "--output-dir", run, processes=2)
    assert begun.returncode == 0, begun.stderr
    lines = [line for line in begun.stdout.splitlines() if line.startswith("weights ")]
    assert len(lines) == 1 and "new last layer: 7 classes there, 10 here" in lines[0], begun.stdout
    learned = load_file(run / "model.safetensors")
    # Grey digits: the colours of the first convolution are added.
    assert torch.allclose(learned["conv1.0.weight"], resnet(7).conv1[0].weight.sum(1, keepdim=True), atol=1e-6)
    assert torch.equal(learned["conv1.3.weight"], resnet(7).conv1[3].weight)
    assert read_model_info(run).origin.sha256 == hashlib.sha256(copy.read_bytes()).hexdigest()

    again = (*RESNET, "--epochs", 2, "--allow-change", "epochs", "--output-dir", run)
    copy.rename(tmp_path / "moved.pth")
    helpers.unfinish(run)
    gone = helpers.run(*again, "--model.weights", copy)
    assert gone.returncode == 0, gone.stderr
    assert "continuing after update" in gone.stdout and "\nweights " not in gone.stdout
    same = helpers.run(*again, "--model.weights", tmp_path / "moved.pth")
    assert "Nothing is left to do" in same.stdout, same.stderr
    refused(helpers.run(*again, "--model.weights", tmp_path / "mistyped.pth"), "no such file, run or checkpoint")
    other = tmp_path / "other.pth"
    torch.save(resnet(3).state_dict(), other)
    refused(helpers.run(*again, "--epochs", 3, "--model.weights", other), "model.weights: ")
    # Evaluation needs neither.
    evaluated = helpers.python("-m", "accel_train", "evaluate", run)
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EMA on six images of three classes."""
    root = tmp_path_factory.mktemp("source")
    pictures(root / "data", ("ant", "bee", "cat"))
    ended = helpers.run(*OF_IMAGES, "--data.root", root / "data", "--ema.enabled", "true", "--output-dir", root / "run")
    assert ended.returncode == 0, ended.stderr
    return root / "run"


OF_IMAGES = (
    "digits", "--data.name", "folder", "--data.workers", 0, "--epochs", 1, "--batch-size", 4, "--virtual-batch-size", 4,
    "--model.name", "test_resnet",
)  # fmt: skip


def pictures(root: Path, classes: tuple[str, ...]) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(classes):
            for copy in range(2):
                (root / split / name).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (48, 48), (80 * number, 50, 99 * copy)).save(root / split / name / f"{copy}.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (("ant", "bee", "cat"), "last layer loaded: the same classes"),
        (("ant", "bee", "dog"), "new last layer: other classes ('dog' is not there)"),
        (("ant", "bee", "dog", "elk"), "new last layer: 3 classes there, 4 here"),
    ],
)
def test_from_run_to_run(tmp_path: Path, source: Path, classes: tuple[str, ...], said: str) -> None:
    pictures(tmp_path / "data", classes)
    words = (*OF_IMAGES, "--data.root", tmp_path / "data", "--optim.lr", 0, "--model.weights")
    begun = helpers.run(*words, source, "--model.freeze-body", "true", "--output-dir", tmp_path / "run")
    assert begun.returncode == 0, begun.stderr
    assert said in begun.stdout and "ema.safetensors (EMA)" in begun.stdout
    one, other = load_file(source / "ema.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    equal = {name for name in one if torch.equal(one[name], other[name])}
    assert one.keys() - equal == (set() if classes[-1] == "cat" else {"fc.weight", "fc.bias"})
    assert torch.equal(one["fc.weight"][:2], other["fc.weight"][:2]) == ("new" not in said)
    there, here = read_model_info(source), read_model_info(tmp_path / "run")
    assert (here.mean, here.std, here.image_size) == (there.mean, there.std, there.image_size)


@pytest.mark.slow
def test_what_model_weights_may_name(tmp_path: Path, source: Path) -> None:
    checkpoint = next((source / "checkpoints").glob("update-*"))
    for path, name in ((source, "ema"), (checkpoint, "ema"), (source / "model.safetensors", "model")):
        weights, info = find_file(path)
        assert weights.file.name == f"{name}.safetensors"
        assert weights.classes == ("ant", "bee", "cat") and info is not None
    bare = tmp_path / "other.safetensors"
    shutil.copy(source / "model.safetensors", bare)
    assert (find_file(bare)[0].classes, find_file(bare)[1]) == (None, None)
    with pytest.raises(UserError, match=r"neither a run .* nor a checkpoint"):
        find_file(tmp_path)
    broken = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (broken / "ema.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        find_file(broken)


@pytest.mark.ci
def test_bad_weights_are_one_line(tmp_path: Path, file: Path) -> None:
    text = tmp_path / "text.safetensors"
    text.write_text("These are not weights.")
    words = (*RESNET, "--output-dir", tmp_path / "run", "--model.weights")
    refused(helpers.run(*words, text, processes=2), "text.safetensors cannot be read")
    refused(helpers.run(*words, file, "--model.name", "test_vit", "--model.image-size", 32), "is of another model")
    refused(helpers.run(*words, file, "--model.pretrained", "true"), "begins from one of them")
