"""`accel_train.parts` with a small model: BatchNorm and dropout on any number of processes, failing saves, messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn

from accel_train import parts
from accel_train.checkpoint import store

WORKER = helpers.ROOT / "tests" / "parts_worker.py"


def trained(directory: Path, updates: int, *words: str, processes: int = 1) -> tuple[int, str]:
    done = helpers.python(WORKER, directory, updates, *words, processes=processes)
    return done.returncode, done.stderr


@pytest.mark.ci
def test_batchnorm_and_dropout_are_the_same_on_any_number_of_processes_and_after_a_restart(tmp_path: Path) -> None:
    for processes in (1, 2, 3):
        assert trained(tmp_path / str(processes), 7, processes=processes) == (0, "")
    # In the middle of an epoch, after its last update, and once more.
    for updates, processes in ((2, 3), (3, 1), (7, 2)):
        assert trained(tmp_path / "stopped", updates, processes=processes) == (0, "")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "2", "3", "stopped")]
    assert len({*weights}) == 1


def test_a_batchnorm_that_is_not_converted_is_refused(tmp_path: Path) -> None:
    code, error = trained(tmp_path / "run", 1, "plain", processes=2)
    assert code == 2
    assert error.startswith("parts_worker.py: error: The model has a BatchNorm, whose statistics depend on how many")
    assert error.count("\n") == 1 and not (tmp_path / "run").exists()


class Own:
    """A run of one process in this one."""

    def __init__(self, directory: Path, seed: int = 0, inputs: int = 3, samples: int = 8, **settings: Any) -> None:
        helpers.forget_accelerate()
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
        model = nn.Linear(inputs, 2)
        self.model, self.optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        plan = parts.share_batch(accelerator, samples, 4, 2)
        prepared = accelerator, self.model, self.optimizer
        self.opened = parts.open_run(directory, *prepared, parts.StopRequests(), plan, seed=seed, **settings)

    def step(self, state: parts.TrainState) -> None:
        self.model(torch.ones(1, self.model.in_features)).sum().backward()
        self.optimizer.step()
        state.update, state.epoch_samples = state.update + 1, state.epoch_samples + 4


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a run with a checkpoint after its first update."""
    own = Own(tmp_path / "run", width=[1, 2])
    with own.opened as (run, state):
        own.step(state)
        run.save(state, wait=True)
    return tmp_path / "run"


def test_a_run_goes_on_where_it_was(saved: Path) -> None:
    own = Own(saved, width=[1, 2])
    with own.opened as (_, state):
        assert (state.epoch, state.update, state.epoch_samples) == (0, 1, 4)
        assert own.optimizer.state_dict()["state"][0]["step"] == 1
    assert json.loads((saved / "checkpoints/update-00000001/state.json").read_text())["generation"] == 1
    assert not (saved / "owner.json").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed: 0 -> 1\. Give the old ones, or another --output-dir\.$"),
        ({"samples": 9}, r"samples: 8 -> 9\. "),
        ({"width": [1, 3]}, r"width: \[1, 2\] -> \[1, 3\]\. "),
        ({"extra": True}, r"extra: None -> True\. "),
        ({"inputs": 4}, r"is of another model: weight is \(2, 3\) there and \(2, 4\) in this model\.$"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_refused(saved: Path, changed: dict, message: str) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(parts.UserError, match=message), Own(saved, **{"width": [1, 2], **changed}).opened:
        pass
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_a_failed_save_is_a_warning_and_the_last_one_is_an_error(saved: Path, monkeypatch, caplog) -> None:
    own = Own(saved, width=[1, 2])
    with own.opened as (run, state):

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(store, "write_checkpoint", full)
            own.step(state)
            run.save(state)
            with pytest.raises(parts.UnsavedError, match=r"update 2 could not .*\. Kept: the checkpoint of update 1, "):
                run.save(state, wait=True)
        assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
            "not saved: checkpoint of update 2: OSError: [Errno 28] No space left on device"
        ] * 2
        run.save(state, wait=True)  # the disk has space again
        assert run.last_saved == 2


def test_weights_that_cannot_be_published_are_a_warning(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = Own(saved, width=[1, 2])
    (saved / "model.safetensors").mkdir()
    with own.opened as (run, state):
        run.publish_weights(state.update)
    (record,) = caplog.records
    assert record.getMessage().startswith("not saved: the final weights are only in ")
    assert [path.name for path in saved.glob(".*")] == []


def test_who_has_lost_the_directory_writes_nothing_more(saved: Path) -> None:
    own = Own(saved, width=[1, 2])
    with own.opened as (run, state):
        text = (saved / "owner.json").read_text()
        (saved / "owner.json").write_text(text.replace('"token": "', '"token": "0'))
        assert (saved / "owner.json").read_text() != text
        own.step(state)
        with pytest.raises(parts.LostError, match="Another start has taken"):
            run.save(state, wait=True)
    assert [path.name for path in (saved / "checkpoints").iterdir()] == ["update-00000001"]


def test_a_run_is_taken_over_from_a_living_owner_if_asked(saved: Path) -> None:
    own = Own(saved, width=[1, 2])
    with own.opened as (run, state):
        other = Own(saved, width=[1, 2])
        with (
            pytest.raises(parts.UserError, match=r"To take over the run: open_run\(…, take_over=True\)\.$"),
            other.opened,
        ):
            pass
        with Own(saved, width=[1, 2], take_over=True).opened as (_, restored):
            assert restored.update == 1
            own.step(state)
            with pytest.raises(parts.LostError, match="Another start has taken"):
                run.save(state, wait=True)


def test_an_accelerator_that_does_not_divide_batches_is_refused(tmp_path: Path) -> None:
    helpers.forget_accelerate()
    accelerator, model = Accelerator(cpu=True), nn.Linear(3, 2)
    plan, optimizer = parts.share_batch(accelerator, 8, 4, 2), torch.optim.SGD(model.parameters())
    opened = parts.open_run(tmp_path / "run", accelerator, model, optimizer, parts.StopRequests(), plan, seed=0)
    with pytest.raises(parts.UserError, match=r"whole batches in turn.* parts\.connect\(\)"), opened:
        pass
    assert not (tmp_path / "run").exists()
