"""`accel-train predict` on a real run and real image files."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from accel_train import cli
from accel_train.config.schema import Augment, Config, Data
from accel_train.data.loading import create_input_pipeline
from accel_train.data.order import EvaluationSampler
from accel_train.data.sources.load import load_splits
from accel_train.records.model_info import ModelInfo, read_model_info
from accel_train.tools import load_run
from accel_train.tools.load_run import LoadedRun, Preprocessing, load


@pytest.fixture(autouse=True)
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    yield
    helpers.forget_accelerate()


@pytest.fixture
def alone(digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that a user copies to a laptop: three, and the EMA; the working directory has no data."""
    run = tmp_path / "laptop" / "run"
    run.mkdir(parents=True)
    for name in ("config.yaml", "model.json", "model.safetensors", "ema.safetensors"):
        shutil.copyfile(digits_run / name, run / name)
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(load_run, "BATCH_SIZE", 2)
    return run


def digit(number: int) -> Image.Image:
    """Grey images of 8x8 pixels, like the digits."""
    return Image.fromarray((load_digits().images[number] * (255 / 16)).round().astype(np.uint8))


def predicted(run: Path, *words: object) -> list[dict]:
    """Predict, and return the images of the CSV file."""
    output = run.parent / "found.csv"
    assert cli.main(["predict", str(run), *map(str, words), "--output", str(output)]) in (0, 1)
    return helpers.classes_in(output)


def probabilities(line: dict) -> dict[str, float]:
    return {found["class"]: found["probability"] for found in line["predictions"]}


@pytest.mark.ci
def test_probabilities_are_those_of_the_model(alone: Path, tmp_path: Path) -> None:
    images = [tmp_path / f"{number}.png" for number in range(40)]
    for number, path in enumerate(images):
        digit(number).save(path)
    info = read_model_info(alone)
    model = load(alone).model
    pixels = torch.from_numpy(np.stack([np.asarray(digit(number)) for number in range(40)]))[:, None]
    with torch.inference_mode():
        expected = model((pixels / 255 - info.mean[0]) / info.std[0]).softmax(1)

    lines = predicted(alone, *images, "--top-k", 99)
    assert [line["image"] for line in lines] == list(map(str, images))
    for line, row in zip(lines, expected, strict=True):
        found = probabilities(line)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert [found[name] for name in "0123456789"] == pytest.approx(row.tolist(), abs=1e-5)
    best = [int(line["predictions"][0]["class"]) for line in lines]
    assert np.mean(best == load_digits().target[:40]) > 0.5  # of two epochs


def test_a_folder_with_rubbish_in_it(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    for name in ("b/2.png", "b/10.PNG", "a.png", ".hidden/3.png", "b/.4.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        digit(0).save(folder / name, format="PNG")
    (folder / "Thumbs.db").write_bytes(b"no image")
    (folder / "b" / "[red]empty.jpg").touch()
    whole = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "c.jpg").symlink_to("nowhere")

    assert cli.main(["predict", str(alone), str(folder), "--top-k", "1"]) == 1
    out, err = capsys.readouterr()
    head, *rows = out.splitlines()
    assert head.split() == ["image", "class", "probability"]
    assert [row.split()[0] for row in rows] == [
        str(folder / name) for name in ("a.png", "b/10.PNG", "b/2.png", "b/[red]empty.jpg", "c.jpg", "cut.png")
    ]
    assert [row.endswith("cannot be read") for row in rows] == [False] * 3 + [True] * 3
    left_out, which, *unreadable, last = err.splitlines()
    assert left_out == f"{folder}: 1 file is not an image by its name and is left out: 1 .db."
    assert which == f"digits_cnn, weights: {alone}/ema.safetensors (EMA)"
    names = [line.partition(" cannot be read: ")[0] for line in unreadable]
    assert names == [str(folder / name) for name in ("b/[red]empty.jpg", "c.jpg", "cut.png")]
    assert last == "3 of 6 images cannot be read."

    # A file that is named is tried, whatever it is called.
    shutil.copyfile(folder / "a.png", tmp_path / "image")
    assert cli.main(["predict", str(alone), str(tmp_path / "image")]) == 0


@pytest.mark.ci
def test_what_the_last_screen_says_can_be_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = helpers.run("digits", "--epochs", 1, "--output-dir", "my run")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  predict ")]
    words = shlex.split(line.removeprefix("  predict "))
    words = words[words.index("predict") :]
    assert words == ["predict", "my run", "IMAGE…"]
    image = words[-1] = str(helpers.write_digits(tmp_path, 1)[0])
    assert cli.main(words) == 0
    head, row = capsys.readouterr().out.splitlines()  # one line an image
    assert head.split() == ["image", "class", "probability"]
    assert row.startswith(image)
    assert cli.main([*words, "--top-k", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert cli.main([*words, "--output", "found.csv"]) == 0
    assert len(Path("found.csv").read_text().splitlines()) == 6


def test_a_row_for_each_image_that_is_given(alone: Path, tmp_path: Path) -> None:
    digit(5).save(tmp_path / "good.png")
    (tmp_path / "empty.png").touch()
    digit(7).resize((40, 40)).save(tmp_path / "large.png")
    given = [tmp_path / name for name in ("good.png", "empty.png", "good.png", "large.png", "empty.png", "good.png")]
    lines = predicted(alone, *given, "--top-k", 3)
    assert [line["image"] for line in lines] == list(map(str, given))
    assert [len(line["predictions"]) for line in lines] == [3, 0, 3, 3, 0, 3]
    assert [line["error"] for line in lines[:3]] == ["", "the file is empty", ""]

    output = tmp_path / "found.csv"
    assert cli.main(["predict", str(alone), *map(str, given[:3]), "--top-k", "1", "--output", str(output)]) == 1
    rows = list(csv.DictReader(output.open(newline="")))
    assert [row["image"] for row in rows] == list(map(str, given[:3]))
    assert [(row["rank"], bool(row["class"]), row["error"]) for row in rows] == [
        ("1", True, ""), ("", False, "the file is empty"), ("1", True, ""),
    ]  # fmt: skip


def test_what_is_wrong_is_told_in_a_line(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path / "0.png"
    digit(0).save(image)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken.csv").mkdir()

    def told(*words: object) -> str:
        assert cli.main(["predict", str(alone), *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("accel-train: error: ")

    assert (
        told(tmp_path / "empty")
        == f"{tmp_path}/empty: no image was found in this folder; name image files or another folder."
    )
    assert told(image, "--output", tmp_path / "taken.csv").startswith(f"--output: {tmp_path}/taken.csv cannot be")
    assert told(image, "--output", image / "x.csv").startswith(f"--output: {image}/x.csv cannot be written (")
    with monkeypatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
            patch.setenv(name, value)
        assert "runs in one process, but 2 were started" in told(image)
    values = json.loads((alone / "model.json").read_text())
    for wrong in ({"channels": "2"}, {"classes": ["\ud800", *values["classes"][1:]]}, {"classes": ["a"]}):
        (alone / "model.json").write_text(json.dumps(values | wrong))
        assert told(image).startswith(f"{alone}/model.json is damaged (")
    (alone / "model.json").unlink()
    assert told(image).startswith(f"{alone}/model.json cannot be read (No such file or directory)")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("data", "augment", "size"),
    [
        (Data("folder"), Augment(), 24),  # files of many sizes
        (Data("folder", channels=1), Augment(resize=40), 24),
        (Data("synthetic", test_limit=9), Augment(resize=20), 18),  # arrays of one size
        (Data("synthetic", test_limit=9, channels=1), Augment(), 16),
    ],
)
def test_preprocessing_is_that_of_evaluation(tmp_path: Path, data: Data, augment: Augment, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    if data.name == "folder":
        for number, name in enumerate(("train/a", "train/b", "test/a", "test/b") * 4):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            height, width = torch.randint(10, 90, (2,), generator=generator).tolist()
            pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{number}.jpg")
    config = Config(data=Data(**{**vars(data), "root": tmp_path}), augment=augment)
    splits = load_splits(config.data, 0, size=16)
    source = splits.test
    assert source is not None
    paths = [tmp_path / f"{number}.png" for number in range(len(source))]
    for number, path in enumerate(paths):
        image = source.fetch([number])[0].permute(1, 2, 0).squeeze(-1)
        Image.fromarray(image.numpy()).save(path)  # PNG: the same pixels again

    accelerator = Accelerator(cpu=True)
    native = splits.image_size if source.in_memory else None
    info = ModelInfo(splits.classes, splits.channels, size, native, splits.mean, splits.std)
    seen: list[torch.Tensor] = []

    class Recorder(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(inputs.clone())
            return torch.zeros(len(inputs), len(splits.classes))

    run = LoadedRun(tmp_path, config, info, Recorder(), tmp_path, Preprocessing(info, augment))
    list(run.classify(paths, top_k=1))
    order = EvaluationSampler(len(source), len(source))
    feed = create_input_pipeline(config, splits, source, order, accelerator, training=False, size=size)
    (batch,) = feed.batches
    expected, _ = feed.transform(batch)
    assert seen[0].shape == (len(source), splits.channels, size, size)
    assert torch.equal(seen[0], expected)
