"""A user with nothing but the wheel: `accel-train init`, and what it wrote trains on two processes."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from pathlib import Path

import helpers
import pytest
import wheel_environment
from test_docs import write_snippets

from accel_train.cli.recipes import starter_files


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_environment.install(tmp_path_factory.mktemp("wheel"))


def in_folder(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the folder's .venv there, without this checkout on Python's path."""
    environment = helpers.environment(PATH=f"{folder}/.venv/bin:/usr/bin:/bin")
    environment.pop("PYTHONPATH", None)
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.ci
def test_the_wheel_has_the_files_of_the_checkout_but_not_of_the_site(installed: Path) -> None:
    (archive,) = installed.parent.glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        prefix = "accel_train/starter/"
        names = {name.removeprefix(prefix) for name in opened.namelist() if name.startswith(prefix)}
    assert names == {name.removeprefix(".") for name in starter_files()}


@pytest.mark.slow
def test_an_initialised_folder_trains_on_two_processes(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    done = subprocess.run(
        [installed / "bin" / "accel-train", "init", str(folder)],
        env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = {name for name in starter_files() if (folder / name).is_file()}
    assert written == {*starter_files()}
    launch = "accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m accel_train.train recipe.yaml"
    done = in_folder(folder, *launch.split(), "--epochs", "2", "--output-dir", "runs/one")
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "runs" / "one" / "result.json").read_text())
    assert (result["world_size"], result["updates"]) == (2, 54)
    environment = json.loads((folder / "runs" / "one" / "environment.json").read_text())
    assert environment["command"][0].startswith(str(installed))  # the wheel's program, not the checkout's


@pytest.mark.slow
def test_a_user_s_own_model_data_and_loss_train_beside_the_wheel(installed: Path, tmp_path: Path) -> None:
    """The files of the pages on own data and models; test_user_code.py kills such runs."""
    folder = tmp_path / "project"
    init = [installed / "bin" / "accel-train", "init", str(folder)]
    subprocess.run(init, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, check=True, capture_output=True)  # type: ignore[arg-type]
    write_snippets(folder)
    launch = "accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m accel_train.train"
    for words in (launch.split(), ["accel-train", "train"]):
        run = f"runs/{words[0]}"
        done = in_folder(folder, *words, "my_recipe.yaml", "--bitwise", "true", "--output-dir", run)
        assert done.returncode == 0, done.stderr
    weights = [folder / "runs" / name / "model.safetensors" for name in ("accelerate", "accel-train")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    done = in_folder(folder, "accel-train", "evaluate", run, "--trust-code", "true")
    assert done.returncode == 0, done.stderr
    # From the texts that the run has kept, whose names have their hashes.
    assert re.search(r"nets-\w+\.py:two_layers on arrows-\w+\.py:data test, 200 images", done.stdout)
    helpers.write_digits(folder / "images")
    done = in_folder(folder, "accel-train", "predict", run, "images", "--trust-code", "true")
    assert done.returncode == 0, done.stderr
