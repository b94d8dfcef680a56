"""`accel-train init`: all files or none, nothing overwritten, and messages that name the command where it helps."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import helpers
import pytest

from accel_train.cli import main
from accel_train.cli.recipes import FOLDERS
from accel_train.config.options import parse
from accel_train.config.recipe import read_recipe
from accel_train.errors import how_to_get

RECIPE = helpers.ROOT / "accel_train" / "starter" / "recipe.yaml"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_environment(folder: Path) -> dict[str, bytes]:
    (folder / ".venv").unlink(missing_ok=True)
    return contents(folder)


def test_it_writes_the_files_of_the_repository_and_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "project"
    assert main(["init", str(folder)]) == 0
    assert f"{folder}: wrote " in capsys.readouterr().out
    link = folder / ".venv"
    assert link.is_symlink() == (sys.prefix != sys.base_prefix)
    assert not link.exists() or link.resolve() == Path(sys.prefix).resolve()
    expected = {f"{top}/{name}": content for top in FOLDERS for name, content in contents(helpers.ROOT / top).items()}
    assert len(expected) > 12
    ignored = RECIPE.with_name("gitignore").read_bytes()
    assert without_environment(folder) == expected | {"recipe.yaml": RECIPE.read_bytes(), ".gitignore": ignored}
    (folder / ".gitignore").write_text("mine")
    assert main(["init", str(folder)]) == 0
    assert "wrote 0 files; " in capsys.readouterr().out
    (folder / "recipe.yaml").unlink()
    assert main(["init", str(folder)]) == 0
    assert "wrote 1 file; " in capsys.readouterr().out
    assert (folder / "recipe.yaml").read_bytes() == RECIPE.read_bytes()
    assert (folder / ".gitignore").read_text() == "mine"


def test_files_that_differ_are_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "train.sbatch").write_text("mine")
    (tmp_path / "recipe.yaml").symlink_to("nowhere")
    before = sorted(map(str, tmp_path.rglob("*")))
    assert main(["init", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in ("slurm/train.sbatch", "recipe.yaml"):
        assert f"{tmp_path / name}," in line or f"{tmp_path / name}." in line
    assert line.count(str(tmp_path)) == 2 and "nothing was written" in line
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert (tmp_path / "slurm" / "train.sbatch").read_text() == "mine"


def test_a_disk_that_is_full_leaves_whole_files(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()

    def small_files() -> None:  # as on a full disk: the largest of the files does not fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    done = subprocess.run(
        [sys.executable, "-m", "accel_train", "init", str(tmp_path)],
        preexec_fn=small_files, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"accel-train: error: DIR: .* cannot be written \(File too large\); name another folder\.\n", done.stderr
    )
    assert all(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert not [path for path in tmp_path.rglob("*") if "accel-train" in path.name or path.suffix == ".tmp"]


def test_the_recipe_explains_options_that_exist(tmp_path: Path) -> None:
    active = parse([str(RECIPE)])
    assert (active.data.name, active.model.name, active.data.val_fraction) == ("digits", "digits_cnn", 0.1)
    everything = re.sub(r"(?m)^( *)#(?=\w)", r"\1", RECIPE.read_text()).replace("image_size: 224", "image_size: 8")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(everything)
    assert len(read_recipe(str(recipe)).options) > len(read_recipe(str(RECIPE)).options) + 10
    assert parse([str(recipe)]).micro_batch_size == 12


def test_a_message_names_the_command_only_where_the_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", "--fsdp", "true"]) == 2
    assert "There is no accelerate_configs/ here: `accel-train init .` writes it." in capsys.readouterr().err
    assert main(["init", "."]) == 0
    capsys.readouterr()
    assert main(["train", "digits", "--fsdp", "true"]) == 2
    assert "accel-train init" not in capsys.readouterr().err
    assert how_to_get("pbs/train.pbs") == ""


@pytest.mark.slow
def test_several_processes_that_were_asked_for_and_did_not_start(tmp_path: Path) -> None:
    """The user of a wheel who writes an own config with MULTI_CPU has no multi_cpu.yaml."""
    (tmp_path / "own.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    words = ["--config_file", "own.yaml", "-m", "accel_train.train", "digits", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],  # the processes read its command line
        cwd=tmp_path, env=helpers.environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    assert "There is no accelerate_configs/multi_cpu.yaml here: `accel-train init .` writes it." in done.stderr
