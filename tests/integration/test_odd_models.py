"""Models whose passes change buffers, or leave parameters out: on several processes, and after a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import helpers
import pytest
from safetensors.torch import load_file

MODEL = f"{helpers.ROOT / 'tests/odd_models.py'}:Restless"
WORDS = (
    "digits --data.name synthetic --data.train-limit 96 --data.test-limit 16 --model.image-size 12 --data.workers 0 "
    "--batch-size 16 --virtual-batch-size 4 --epochs 2 --checkpoint.keep 20 --checkpoint.every-updates 1 "
    f"--model.name {MODEL}"
)
SYNCED = """
from torch import nn

def net(num_classes):
    plain = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, num_classes))
    return nn.SyncBatchNorm.convert_sync_batchnorm(plain)
"""


@pytest.mark.slow
def test_a_restart_goes_on_with_the_same_buffers_on_all_processes(tmp_path: Path) -> None:
    """Each pass changes the buffers of its process and skips a block of its own choice; each update begins anew."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    done = helpers.run(*WORDS.split(), "--output-dir", whole, processes=2)
    assert done.returncode == 0, done.stderr
    assert "changes the buffer norm.mean (Centred)." in done.stderr
    assert done.stderr.count("warning: model:") == done.stderr.count("\n") == 3, done.stderr  # none of torch's
    shutil.copytree(whole, again)
    (again / "result.json").unlink()
    for late in sorted((again / "checkpoints").iterdir())[9:]:  # of 12
        shutil.rmtree(late)
    assert helpers.run(*WORDS.split(), "--output-dir", again, processes=2).returncode == 0
    one, other = (load_file(run / "model.safetensors") for run in (whole, again))
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_that_normalises_over_all_processes_is_refused_in_one_line(processes: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SYNCED)
    words = ["digits", "--model.name", tmp_path / "mine.py:net", "--output-dir", tmp_path / "run"]
    done = helpers.run(*words, processes=processes)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "0 (SyncBatchNorm) normalises by the samples of all processes. Use a BatchNorm instead" in done.stderr


FLAT = "digits --data.train-limit 75 --data.test-limit 30 --data.val-fraction 0 --batch-size 16 --virtual-batch-size 4"
FLAT += " --epochs 1 --data.workers 0 --log-every-updates 1 --optim.lr 0.01"


@pytest.mark.ci
@pytest.mark.parametrize("name", ["TwoViews", "Capacity", "Recomputed", "Prototypes"])
@pytest.mark.parametrize("bitwise", ["false", "true"])
def test_a_model_that_couples_samples_learns_the_same_on_any_number_of_processes(
    name: str, bitwise: str, tmp_path: Path
) -> None:
    """The last update has 11 samples of 16: of its virtual batches one has three, and one has none."""
    words = [*FLAT.split(), "--model.name", MODEL.replace("Restless", name), "--bitwise", bitwise]
    weights = []
    for processes in (1, 2, 3):
        run = tmp_path / str(processes)
        done = helpers.run(*words, "--output-dir", run, processes=processes)
        assert done.returncode == 0, done.stderr
        assert ("one pass over two virtual batches" in done.stderr) == (bitwise == "false"), done.stderr
        weights.append(load_file(run / "model.safetensors"))
    for other in weights[1:]:
        for key, value in weights[0].items():
            if bitwise == "true":
                assert value.equal(other[key]), key
            else:
                assert (value - other[key]).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), key


@pytest.mark.ci
def test_data_dependent_initialisation_is_refused_where_processes_would_differ(tmp_path: Path) -> None:
    words = [*FLAT.split(), "--model.name", MODEL.replace("Restless", "Initialised")]
    alone = helpers.run(*words, "--output-dir", tmp_path / "alone")
    assert alone.returncode == 0 and "changes the parameter bias" in alone.stderr, alone.stderr
    for bitwise, processes in (("false", 2), ("true", 1)):
        done = helpers.run(*words, "--bitwise", bitwise, "--output-dir", tmp_path / "run", processes=processes)
        assert done.returncode == 2 and "changes the parameter bias" in done.stderr, done.stderr


@pytest.mark.ci
def test_a_resume_keeps_what_the_trial_has_found(tmp_path: Path) -> None:
    """A later version of a library, or a device without float64, must not change how a run's passes are divided."""
    run = tmp_path / "run"
    words = [*FLAT.split(), "--epochs", "3", "--model.name", MODEL.replace("Restless", "TwoViews"), "--output-dir", run]

    def says(processes: int, *, stops: bool) -> str:
        if stops:
            (run / "STOP").touch()
        done = helpers.run(*words, processes=processes)
        assert done.returncode == 0 and (run / "result.json").exists() == (not stops), done.stderr
        return done.stderr

    run.mkdir()
    assert "depends on the other samples" in says(1, stops=True)
    facts = run / "environment.json"
    found = json.loads(facts.read_text())
    facts.write_text(json.dumps(found | {"trial": found["trial"] | {"together": "what was found before"}}))
    assert "what was found before" in says(2, stops=True)
    facts.write_text(json.dumps(found | {"trial": {"together": 1}}))  # of no trial: the model is tried again
    assert "depends on the other samples" in says(1, stops=False)
