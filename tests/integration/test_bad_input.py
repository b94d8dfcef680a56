"""A new user's mistakes: one helpful line, exit code 2, no traceback, and no incomplete file."""

import contextlib
from pathlib import Path

import helpers
import pytest
from PIL import Image

from accel_train.cli import main


@pytest.fixture(autouse=True)
def clean(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Give the test an empty working directory and a new Accelerate state.

    The directory stays: that of a test that passed is removed, and the server of data workers, which a test leaves to
    the next ones, would be in it. MKL ends a process in a removed directory.
    """
    monkeypatch.chdir(tmp_path_factory.mktemp("bad_input"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    yield
    helpers.forget_accelerate()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one-line error of `accel-train train ARGUMENTS`."""
    before = sorted(Path().rglob("*"))
    assert main(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("accel-train: error: ") and shown.err.count("\n") == 1, shown.err
    assert sorted(Path().rglob("*")) == before, "something was written"
    return shown.err


def images(root: str, **classes: int) -> None:
    for name, count in classes.items():
        (Path(root) / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9 + number, 7), (number * 20, 0, 99)).save(Path(root) / name / f"{number}.png")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["digits", "--model.name", "resnet81"], "'resnet18'"),
        (["digits", "--data.name", "minst"], "mnist"),
        (["digits", "--trackers", "tensorbord"], "'tensorboard'"),
        (["digits", "--trackers", "comet_ml"], "Known are tensorboard, wandb, mlflow"),
        (["digits", "--optim.name", "addam"], "'adam'"),
        (["digits", "--batch-size", "4000"], "1438"),
        (["digits", "--batch-size", "31", "--augment.mixup", "0.2"], "30 or 32"),
        (["digits", "--augment.mean", "0.1", "0.2"], "2 values"),
        (["digits", "--augment.pad", "8", "--augment.pad-mode", "reflect"], "8 pixels"),
        (["digits", "--augment.policy", "autoaugmentation"], "'autoaugment'"),
        (["digits", "--schedule.name", "plateau"], "--data.val-fraction"),
        (["digits", "--best-metric", "loss"], "--best-metric loss: follows the validation split"),
        (["digits", "--best-metric", "map", "--data.val-fraction", "0.1"], "choose one of accuracy, loss, f1."),
        (["digits", "--stop.patience-epochs", "3"], "--stop.patience-epochs 3: follows the validation split"),
        (["digits", "--data.sampler", "balanced", "--loss.class-weights", "balanced"], "correct the imbalance twice"),
        (["digits", "--data.name", "folder", "--data.root", "nowhere"], "nowhere"),
    ],
)
def test_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(capsys, *arguments)


def test_directory_that_cannot_have_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/checkpoints").touch()
    assert "run/checkpoints is not a folder" in refused(capsys, "digits", "--output-dir", "run")


def test_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with helpers.small_disk(Path("run"), "64k"):
        Path("run/checkpoints").mkdir()
        with Path("run/rubbish").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert "No space left on device" in refused(capsys, "digits", "--output-dir", "run")


def test_folders(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["digits", "--data.name", "folder", "--data.root"]
    Path("empty").mkdir()
    assert "empty" in refused(capsys, *folder, "empty")
    images("single", cat=3)
    assert "one class" in refused(capsys, *folder, "single")
    images("hollow", cat=3, dog=0)
    assert "dog" in refused(capsys, *folder, "hollow", "--data.test-fraction", "0.5")


def test_output_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert "file" in refused(capsys, "digits", "--output-dir", "file")
    assert "file" in refused(capsys, "digits", "--output-dir", "file/below")


def test_unreadable_image_stops_training_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    images("photos", cat=8, dog=8)
    Path("photos/cat/3.png").write_bytes(b"not a picture")
    options = ["--data.name", "folder", "--data.root", "photos", "--data.test-fraction", "0.1", "--batch-size", "4"]
    for workers in ("0", "1"):
        small = ["--data.workers", workers, "--model.image-size", "8", "--augment.crop", "center", "--model.name"]
        assert main(["train", "digits", *options, *small, "mnist_cnn", "--output-dir", f"run{workers}"]) == 2
        error = capsys.readouterr().err
        assert "photos/cat/3.png" in error and "check-data" in error
        helpers.forget_accelerate()


def test_odd_images_train(capsys: pytest.CaptureFixture[str]) -> None:
    images("photos", cat=4, dog=4)
    odd = {"grey": Image.new("L", (5, 6)), "alpha": Image.new("RGBA", (8, 3)), "dot": Image.new("RGB", (1, 1))}
    odd |= {"palette": Image.new("P", (6, 6)), "bit": Image.new("1", (4, 4))}
    for name, image in odd.items():
        image.save(f"photos/cat/{name}.png")
    Image.new("CMYK", (9, 9)).save("photos/dog/cmyk.jpg")
    arguments = ["digits", "--data.name", "folder", "--data.root", "photos", "--data.test-fraction", "0.2"]
    arguments += ["--model.image-size", "8", "--batch-size", "4", "--epochs", "1", "--data.workers", "0"]
    assert main(["train", *arguments, "--augment.crop", "resized", "--output-dir", "run"]) == 0


@pytest.mark.ci
def test_one_of_two_processes_speaks(tmp_path: Path) -> None:
    """Both processes find that they cannot share the batch, and one of them prints the error."""
    done = helpers.python("-m", "accel_train.train", "digits", "--batch-size", 1, processes=2, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("accel-train: error:") == 1
    assert "found 1, which 2 processes cannot share: some would never have work" in done.stderr
    assert list(tmp_path.iterdir()) == []
