"""predict: calibrated probabilities, and the files that it writes for whole folders."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from PIL import Image

from accel_train import cli
from accel_train.analysis.inference.calibrated import find_calibration
from accel_train.analysis.inference.predict import Prediction
from accel_train.analysis.loaded_run import load
from accel_train.api import predict
from accel_train.cli.of_run.predict import _write

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(autouse=True)
def pipe_signal() -> Iterator[None]:
    before = signal.getsignal(signal.SIGPIPE)  # predict lets it end the program
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.fixture(scope="module")
def evaluated(digits_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, evaluated on its test split: so it has a temperature, fitted on its validation split."""
    run = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(digits_run, run)
    done = helpers.python("-m", "accel_train", "evaluate", run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def run(evaluated: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(evaluated, tmp_path / "run"))


def change_temperature(run: Path, **values: object) -> None:
    path = run / "evaluation-test.json"
    record = json.loads(path.read_text())
    record["ema"]["temperature"].update(values)
    path.write_text(json.dumps(record))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.ci
def test_calibrated_probabilities_are_those_of_the_temperature(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    temperature = json.loads((run / "evaluation-test.json").read_text())["ema"]["temperature"]
    assert not temperature["at_bound"] and temperature["count"] == 144 and abs(temperature["value"] - 1) > 0.01
    loaded = load(run)
    images = sorted((run / "examples").iterdir())
    with torch.inference_mode():
        logits = loaded.model(torch.stack([loaded.transform(path) for path in images]))
    plain, scaled = logits.softmax(1), (logits / temperature["value"]).softmax(1)
    output = tmp_path / "found.csv"
    assert cli.main(["predict", str(run), str(run / "examples"), "--top-k", "10", "--output", str(output)]) == 0
    value, file = f"{temperature['value']:.3f}", run / "evaluation-test.json"
    assert f"calibrated: logits divided by {value}, the temperature fitted on 144 validation images ({file})\n" in (
        capsys.readouterr().err
    )
    found = rows_of(output)
    assert [row["image"] for row in found] == [str(path) for path in images for _ in range(10)]
    for row, number in zip(found, [n for n in range(len(images)) for _ in range(10)], strict=True):
        label = loaded.classes.index(row["class"])
        assert float(row["probability"]) == pytest.approx(plain[number, label].item(), rel=1e-4)
        assert float(row["calibrated"]) == pytest.approx(scaled[number, label].item(), rel=1e-4)

    # From Python and as JSON: the same.
    for from_python in (predict(run, images, top_k=10), loaded.predict(images, top_k=10)):
        flat = [value for each in from_python for value in each.calibrated]
        assert flat == pytest.approx([float(row["calibrated"]) for row in found], rel=1e-4)
    assert cli.main(["predict", str(run), str(images[0]), "--output", str(tmp_path / "found.jsonl")]) == 0
    line = json.loads((tmp_path / "found.jsonl").read_text())
    as_json = [best["calibrated"] for best in line["predictions"]]
    assert as_json == pytest.approx([float(row["calibrated"]) for row in found[:5]], rel=1e-4)

    # On the console both are shown.
    capsys.readouterr()
    assert cli.main(["predict", str(run), str(images[0])]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["image", "class", "probability", "calibrated"]
    assert row.split()[2:] == [f"{float(found[0][name]):.2%}" for name in ("probability", "calibrated")]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"at_bound": True}, "is a bound of the search, not a fitted value"),
        ({"at_bound": None}, "is damaged, or of an older version"),
        ({"value": float("nan")}, "is damaged, or of an older version"),
        ({"value": 1000.0}, "is damaged, or of an older version"),
        ({"value": "1.5"}, "is damaged, or of an older version"),
        ({"sha256": "0" * 64}, "is of other weights"),
        ({"image_size": 9}, "is of images of another size"),
        ({"resize": 20}, "is of images of another size"),
    ],
)
def test_a_temperature_that_does_not_fit_is_not_used(run: Path, values: dict[str, object], reason: str) -> None:
    change_temperature(run, **values)
    calibration = load(run).calibration
    assert calibration.temperature is None
    assert calibration.text.startswith("probabilities are not calibrated: ") and reason in calibration.text
    found = predict(run, [next((run / "examples").iterdir())])[0]
    assert len(found.probabilities) == 5 and found.calibrated == ()


def test_runs_without_a_temperature(run: Path, tmp_path: Path) -> None:
    loaded = load(run)
    info, augment = loaded.info, loaded.config.augment
    assert find_calibration(run, loaded.weights, info, augment).temperature is not None
    # The raw weights have none: it was fitted for the EMA.
    assert "no temperature for these weights" in load(run, weights="model").calibration.text
    # The checkpoint from which the weights were copied has the same.
    newest = max((run / "checkpoints").iterdir())
    assert load(run, newest).calibration.temperature == loaded.calibration.temperature
    several = info.__class__(**{**vars(info), "multi_label": True})
    assert "one label an image" in find_calibration(run, loaded.weights, several, augment).text
    for content in ("", "[]", "{", '{"ema": 1}', '{"ema": {"temperature": 2, "weights": "ema.safetensors"}}'):
        (run / "evaluation-test.json").write_text(content)
        assert "has no temperature" in find_calibration(run, loaded.weights, info, augment).text
    (run / "evaluation-test.json").unlink()
    assert "fits a temperature, if the data has" in find_calibration(run, loaded.weights, info, augment).text


def test_a_folder_of_folders_twice(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two files of one name in two folders; an output inside the folder, which exists the second time."""
    photos, images = tmp_path / "photos", sorted((run / "examples").iterdir())
    for name, image in (("a/1.png", images[0]), ("b/1.png", images[1]), ("b/c/d/1.png", images[2])):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, photos / name)
    (photos / "b" / "2.png").touch()
    output = photos / "found.csv"
    output.write_text("earlier")
    contents = []
    for _ in range(2):
        assert cli.main(["predict", str(run), str(photos), "--top-k", "1", "--output", str(output)]) == 1
        contents.append(output.read_bytes())
        assert "found.csv" in capsys.readouterr().out
    assert contents[0] == contents[1]
    rows = rows_of(output)
    assert [row["image"] for row in rows] == [
        str(photos / name) for name in ("a/1.png", "b/1.png", "b/2.png", "b/c/d/1.png")
    ]
    assert [row["error"] for row in rows] == ["", "", "the file is empty", ""]
    assert [bool(row["calibrated"]) for row in rows] == [True, True, False, True]
    assert sorted(path.name for path in photos.iterdir()) == ["a", "b", "found.csv"]  # nothing is left over


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_half_way_there_is_no_half_file(tmp_path: Path, how: signal.Signals) -> None:
    script = (
        "import signal, sys, time; from pathlib import Path; "
        "from accel_train.analysis.inference.predict import Prediction\n"
        "from accel_train.cli.of_run.predict import _write\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def predictions():\n"
        "    for number in range(100_000):\n"
        "        yield Prediction(Path(f'{number}.jpg'), ('a',), (1.0,))\n"
        "        if number == 50_000:\n"
        "            print('half', flush=True); time.sleep(60)\n"
        "_write(Path('found.csv'), predictions())"
    )
    (tmp_path / "found.csv").write_text("of an earlier run")
    line = [sys.executable, "-c", script]
    with subprocess.Popen(line, cwd=tmp_path, env=helpers.environment(), stdout=subprocess.PIPE, stderr=-3) as program:
        assert program.stdout is not None and program.stdout.readline() == b"half\n"
        os.kill(program.pid, how)
    assert (tmp_path / "found.csv").read_text() == "of an earlier run"
    left = [path.name for path in tmp_path.iterdir() if path.name != "found.csv"]
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)
    assert how is not signal.SIGINT or left == []


def test_predictions_are_written_as_they_come(tmp_path: Path) -> None:
    """No prediction is held when the next one is made."""
    import gc
    import weakref

    alive: weakref.WeakSet[Prediction] = weakref.WeakSet()
    most = 0

    def predictions() -> Iterator[Prediction]:
        nonlocal most
        for number in range(20_000):
            one = Prediction(Path(f"{number}.jpg"), ("a", "b"), (0.75, 0.25))
            if number % 100 == 0:
                alive.add(one)
                most = max(most, len(alive))
            yield one

    _write(tmp_path / "found.csv", predictions())
    gc.collect()
    assert most <= 2
    with (tmp_path / "found.csv").open() as file:
        assert sum(1 for _ in file) == 40_001


def test_odd_names_and_images_without_a_class(tmp_path: Path) -> None:
    names = ["a,b.jpg", 'quo"te.jpg', "line\nbreak.jpg", os.fsdecode(b"\xff.jpg"), "=1+1.jpg"]
    made = [Prediction(Path(name), (), ()) for name in names]
    _write(tmp_path / "found.csv", made)
    with (tmp_path / "found.csv").open(newline="", errors="surrogateescape") as file:
        head, *rows = csv.reader(file)
    assert [row[0] for row in rows] == names and {len(row) for row in rows} == {len(head)}
    _write(tmp_path / "found.jsonl", made)
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert lines == [{"image": name, "predictions": []} for name in names]
    _write(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_text() == "image,rank,class,probability,calibrated,error\n"


def test_no_bar_without_a_terminal(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(6):
        Image.fromarray(np.full((8, 8), number * 40, dtype=np.uint8)).save(tmp_path / f"{number}.png")
    images = sorted(map(str, tmp_path.glob("*.png")))
    words = ["predict", str(run), *images, "--batch-size", "2", "--output", str(tmp_path / "found.csv")]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert "classifying" not in out + err and len(out.splitlines()) == 1 and len(err.splitlines()) == 2
