"""The checkpoints of a run of one process: what is saved, kept and restored, and on which disks."""

import json
import os
import pickle
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

import helpers
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from checkpoint_worker import same
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn

from accel_train.checkpoint import store
from accel_train.checkpoint.directory import find_newest_checkpoint, list_updates
from accel_train.checkpoint.reading import RunWeights
from accel_train.checkpoint.state import TrainState
from accel_train.checkpoint.store import Checkpoints
from accel_train.config.schema import Checkpoint, Config, Data, Ema, Optim, Schedule
from accel_train.errors import UserError
from accel_train.files import sha256
from accel_train.ownership.owner import Lease, LostError


class Run:
    """A run of one process in this one."""

    def __init__(
        self, folder: Path, seed: int = 0, config: Config | None = None, schedule=None, samples: int = 64
    ) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.ema = ModelEmaV3(model)
        accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = accelerator.prepare(model, create_optimizer_v2(model, opt="adamw", lr=0.1))
        folder.mkdir(exist_ok=True)
        self.folder, self.state = folder / "checkpoints", TrainState()
        self.checkpoints = Checkpoints(
            config or Config(), accelerator, self.model, self.optimizer, Lease(folder, None), samples=samples,
            ema=self.ema.module, schedule=schedule,
        )  # fmt: skip

    def save(self, update: int, **state) -> None:
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()
        self.state = TrainState(update=update, **state)
        self.checkpoints.save(self.state, wait=True)

    def weights(self) -> dict:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints."""
    run = Run(tmp_path / "run")
    run.save(1)
    run.before = run.weights()  # type: ignore[attr-defined]
    run.save(2, samples_seen=7, best_value=0.1 + 0.2, best_update=2, epoch_loss_sum=1 / 3)
    assert run.checkpoints.failures == []
    return run


def test_the_position_is_restored_exactly(run):
    again = Run(run.folder.parent, seed=1)
    assert again.checkpoints.restore("auto") == run.state
    assert same(again.weights(), run.weights())
    assert same(dict(again.ema.module.state_dict()), dict(run.ema.module.state_dict()))
    assert not same(again.weights(), dict(again.ema.module.state_dict()))
    assert again.checkpoints.last_saved == 2
    state = json.loads((run.folder / "update-00000002" / "state.json").read_text())
    assert state["seed"] == 0
    assert state["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(run, monkeypatch):
    write, gate, writers, most = store.write_checkpoint, threading.Event(), [], []

    def slow(folder, snapshot):
        writers.append(folder)
        most.append(len(writers))
        gate.wait(10)
        write(folder, snapshot)
        writers.remove(folder)

    monkeypatch.setattr(store, "write_checkpoint", slow)
    expected = run.weights()
    run.checkpoints.save(TrainState(update=3))
    assert run.checkpoints.is_writing and run.checkpoints.last_saved == 2
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.add_(1)
    threading.Timer(0.2, gate.set).start()
    run.checkpoints.save(TrainState(update=4), wait=True)
    assert most == [1, 1] and run.checkpoints.failures == []
    found = load_file(run.folder / "update-00000003" / "model.safetensors")
    assert same(found, expected) and not same(found, run.weights())


def test_a_new_run_has_nothing_to_restore(tmp_path):
    run = Run(tmp_path / "run")
    assert run.checkpoints.restore("auto") is None
    with pytest.raises(UserError, match="must"):
        run.checkpoints.restore("must")
    assert not run.folder.exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json", "ema.safetensors"]
)
@pytest.mark.parametrize("damage", ["altered", "cut", "missing"])
def test_a_broken_checkpoint_is_set_aside_and_the_one_before_is_used(run, name, damage):
    file = run.folder / "update-00000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content if damage == "altered" else content[:-10])
    if damage == "missing":
        file.unlink()
    again = Run(run.folder.parent, seed=1)
    position = again.checkpoints.restore("must")
    assert position is not None
    assert position.update == 1
    assert same(again.weights(), run.before)
    assert (run.folder / "update-00000002.broken-1").is_dir()
    named = str(file.parent if name == "manifest.json" else file)  # an altered manifest may seem to be another's fault
    assert any(named in note and "broken-1" in note for note in again.checkpoints.notes)


class Hostile:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_a_hostile_file_is_not_executed(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    place = run.folder / "update-00000002"
    (place / "optimizer.pt").write_bytes(pickle.dumps(Hostile(), protocol=2))
    manifest = json.loads((place / "manifest.json").read_text())
    digest = {"size": (place / "optimizer.pt").stat().st_size, "sha256": sha256(place / "optimizer.pt")}
    manifest["files"]["optimizer.pt"] = digest
    (place / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"optimizer\.pt matches its checksum, but it is not a file of this program"):
        Run(run.folder.parent).checkpoints.restore("auto")
    assert not (tmp_path / "executed").exists()
    pickle.loads((place / "optimizer.pt").read_bytes())  # it would have been
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/update-00000002"])
def test_a_path_begins_a_new_run_which_then_goes_on_by_itself(run, tmp_path, path):
    new = Run(tmp_path / "new", seed=1)
    named = str(run.folder.parent / path)
    assert new.checkpoints.restore(named) == run.state
    assert new.checkpoints.last_saved is None
    new.save(3)
    again = Run(tmp_path / "new", seed=2)
    position = again.checkpoints.restore(named)  # the same command once more
    assert position is not None
    assert position.update == 3
    assert any("is not used" in note for note in again.checkpoints.notes)


def test_a_path_in_this_run_is_its_newest_or_an_error(run):
    again = Run(run.folder.parent)
    for path in (run.folder.parent, run.folder, run.folder / "update-00000002"):
        assert again.checkpoints.restore(str(path)) == run.state
    with pytest.raises(UserError, match="not the newest checkpoint of this run: update-00000002"):
        again.checkpoints.restore(str(run.folder / "update-00000001"))


def test_a_path_without_a_whole_checkpoint_is_an_error_and_stays_as_it_is(run, tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        Run(tmp_path / "new").checkpoints.restore(str(tmp_path / "nowhere"))
    (run.folder / "update-00000002" / "optimizer.pt").unlink()
    with pytest.raises(UserError, match=r"optimizer\.pt is missing"):
        Run(tmp_path / "new").checkpoints.restore(str(run.folder / "update-00000002"))
    assert list_updates(run.folder) == [1, 2]


MIDDLE = {"epoch": 2, "epoch_samples": 20, "epoch_count": 20}


@pytest.mark.parametrize(
    ("state", "config", "samples", "message"),
    [
        (MIDDLE, Config(epochs=3, seed=1), 64, "in the middle of epoch 3.*seed: 0 -> 1.*--resume from a checkpoint"),
        (MIDDLE, Config(epochs=3, data=Data(train_limit=9)), 9, "train-limit: None -> 9; 64 -> 9 training samples"),
        (MIDDLE, Config(epochs=3, data=Data(sampler="balanced")), 64, "data.sampler: shuffle -> balanced"),
        (MIDDLE, Config(epochs=3), 63, "data: 64 -> 63 training samples"),
        (MIDDLE, Config(epochs=2, batch_size=16), 64, "--epochs 2, 8 updates: 9 updates are done .* later end"),
        ({"epoch": 2}, Config(epochs=1, batch_size=16), 64, "--epochs 1, 4 updates: 8 updates are done .* later end"),
    ],
)
@pytest.mark.parametrize("allow", [(), ("seed", "data", "epochs")])
def test_what_cannot_be_kept_is_refused_even_if_it_is_allowed(tmp_path, state, config, samples, message, allow):
    run = Run(tmp_path / "run", config=Config(epochs=3))
    run.save(1, epoch=1)
    run.save(2, **state)
    with pytest.raises(UserError, match=message) as error:
        Run(tmp_path / "run", config=config, samples=samples).checkpoints.restore("auto", allow)
    assert "allow-change" not in str(error.value)


def test_the_data_changes_between_epochs_if_it_is_allowed(tmp_path):
    run = Run(tmp_path / "run", config=Config(epochs=3))
    run.save(1, epoch=1)
    again = Run(tmp_path / "run", config=Config(epochs=3), samples=65)
    with pytest.raises(UserError, match=r"data: 64 -> 65 training samples.* --allow-change data$"):
        again.checkpoints.restore("auto")
    assert again.checkpoints.restore("auto", ["data"]) is not None


def test_another_configuration_is_refused_or_allowed(run):
    config = Config(optim=Optim(weight_decay=0.5), log_every_updates=3)
    again = Run(run.folder.parent, 1, config)
    with pytest.raises(UserError, match=r"optim\.weight-decay: 0\.0 -> 0\.5"):
        again.checkpoints.restore("auto")
    for group in again.optimizer.param_groups:
        group["weight_decay"] = 0.5  # as optim.py makes it of this configuration
    assert again.checkpoints.restore("auto", ["optim.weight-decay"]) == run.state
    assert [group["weight_decay"] for group in again.optimizer.param_groups] == [0.5]
    assert any("log-every-updates: 50 -> 3" in note for note in again.checkpoints.notes)


def test_another_optimizer_starts_anew_if_it_is_allowed(run):
    again = Run(run.folder.parent, 1, Config(optim=Optim(name="lion")))
    assert again.checkpoints.restore("auto", ["optim.name"]) == run.state
    assert not again.optimizer.state
    assert same(again.weights(), run.weights())


def test_another_model_is_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"another model: 0\.bias is \(4,\) there and \(5,\)"):
        RunWeights.read(run.folder / "update-00000002/model.safetensors").load_into(nn.Sequential(nn.Linear(4, 5)))


@dataclass
class NewerState(TrainState):
    moons: int = 3


def test_an_entry_that_nobody_knows_is_refused(run):
    run.checkpoints.save(NewerState(update=2), wait=True)
    with pytest.raises(UserError, match="moons is '3', which no run can have counted"):
        Run(run.folder.parent).checkpoints.restore("auto")


class Counter:
    """A schedule that counts; its state has one part more than that of its earlier version had."""

    def __init__(self, count=0, **more):
        self.count, self.more = count, more

    def state_dict(self):
        return {"count": self.count, **self.more}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_only_the_plateau_schedule_has_a_state_and_says_itself_which_it_takes(tmp_path):
    for name, expected in (("plateau", 5), ("cosine", 0)):
        config, now = Config(schedule=Schedule(name=name)), Counter(moons=3)  # type: ignore[arg-type]
        Run(tmp_path / name, 0, config, Counter(5)).save(1)
        Run(tmp_path / name, 0, config, now).checkpoints.restore("auto")
        assert now.count == expected
    other = Counter()
    other.state_dict = dict  # type: ignore[method-assign]
    config = Config(schedule=Schedule(name="plateau"))
    Run(tmp_path / "plateau", 0, config, other).save(2)
    with pytest.raises(UserError, match=r"state\.json matches its checksum, but it is not a file of this program"):
        Run(tmp_path / "plateau", 0, config, Counter()).checkpoints.restore("auto")


def test_weights_are_loaded_by_themselves(run):
    path = find_newest_checkpoint(run.folder.parent)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    (path / "optimizer.pt").unlink()  # not needed for weights
    for name, expected in (("model", run.weights()), ("ema", dict(run.ema.module.state_dict()))):
        RunWeights.read(path / f"{name}.safetensors").load_into(model)
        assert same(dict(model.state_dict()), expected)
    (path / "model.safetensors").write_bytes(b"\0" * (path / "model.safetensors").stat().st_size)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        RunWeights.read(path / "model.safetensors")
    assert find_newest_checkpoint(run.folder.parent).name == "update-00000001"
    assert list_updates(run.folder) == [1, 2]
    assert find_newest_checkpoint(run.folder / "nowhere") is None


def test_without_a_running_mean(run):
    shutil.rmtree(run.folder)
    run.checkpoints.ema = None
    run.save(1)
    again = Run(run.folder.parent, 1, Config(ema=Ema(enabled=True)))
    again.checkpoints.restore("auto", ["ema"])
    assert same(dict(again.ema.module.state_dict()), run.weights())  # it starts from the weights


def test_the_newest_and_the_best_are_kept(tmp_path):
    run = Run(tmp_path / "run", 0, Config(checkpoint=Checkpoint(keep=2)))
    for update in range(10, 70, 10):
        run.save(update, best_value=0.5, best_update=30 if update >= 30 else 10)
    assert run.checkpoints.failures == []
    assert list_updates(run.folder) == [30, 50, 60]


@pytest.mark.parametrize(("checks", "left"), [(0, [1, 2]), (1, [1, 2, 3]), (2, [2, 3]), (3, [3])])
def test_who_has_lost_the_run_commits_and_deletes_nothing_more(run, checks, left):
    """Another start takes the run after so many of this one's checks: before the commit, or before a deletion."""
    run.checkpoints.keep = 1
    allowed = iter(range(checks))

    def check() -> None:
        if next(allowed, None) is None:
            raise LostError("another start has the run")

    run.checkpoints.lease.check = check
    run.save(3)
    assert list_updates(run.folder) == left
    assert run.checkpoints.failures == []  # it is no failure: the run ends


def test_what_an_earlier_owner_wrote_late_is_not_resumed_from(run):
    run.checkpoints.lease.generation = 2
    run.save(3)
    generations = run.folder.parent / "generations"
    generations.mkdir()
    for update, expected in ((3, 3), (2, 2)):  # from which the next owner began
        (generations / "00000003.json").write_text(json.dumps({"generation": 3, "update": update}))
        position = Run(run.folder.parent, seed=1).checkpoints.restore("auto")
        assert position is not None
        assert position.update == expected
    assert list_updates(run.folder) == [2] and (run.folder / "update-00000003.broken-1").is_dir()


def test_the_loss_scaler_is_restored(run):
    scaler, again = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    run.checkpoints.accelerator.scaler = scaler
    run.save(3)
    other = Run(run.folder.parent, seed=1)
    other.checkpoints.accelerator.scaler = again
    other.checkpoints.restore("must")
    assert again.state_dict() == scaler.state_dict() and again.get_scale() == 8


def test_the_best_value_of_another_metric_no_longer_counts(run):
    again = Run(run.folder.parent, seed=1, config=Config(best_metric="loss"))
    position = again.checkpoints.restore("must", ["best-metric"])
    assert position is not None
    assert (run.state.best_update, position.best_update, position.best_value) == (2, None, None)
    assert any("the best loss so far no longer counts" in note for note in again.checkpoints.notes)


def failing(run: Run, update: int) -> str:
    """Save, which must fail; the earlier checkpoints must stay complete."""
    run.checkpoints.failures.clear()
    run.save(update)
    (failure,) = run.checkpoints.failures
    assert failure.startswith(f"checkpoint of update {update}: ")
    assert run.checkpoints.last_saved == 2
    return failure


def test_a_vanished_directory_does_not_stop_training(run):
    away = run.folder.parent.with_name("away")
    run.folder.parent.rename(away)
    assert "FileNotFoundError" in failing(run, 3)
    assert not run.folder.parent.exists()
    assert run.checkpoints.newest() is None
    assert find_newest_checkpoint(away).name == "update-00000002"
    away.rename(run.folder.parent)
    assert run.checkpoints.newest().name == "update-00000002"
    run.save(4)
    assert find_newest_checkpoint(run.folder.parent).name == "update-00000004"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 128 KiB."""
    with helpers.small_disk(tmp_path / "disk", "128k") as disk:
        yield disk


def test_a_full_disk_and_a_read_only_one_do_not_stop_training(small_disk):
    run = Run(small_disk / "run")
    run.save(1)
    run.save(2)
    assert run.checkpoints.failures == []
    rubbish = small_disk / "rubbish"
    for size in (65536, 4096, 1024):
        with rubbish.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass
    failing(run, 3)
    rubbish.unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert "Read-only" in failing(run, 4)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert find_newest_checkpoint(run.folder.parent).name == "update-00000002"
    run.save(5)
    assert find_newest_checkpoint(run.folder.parent).name == "update-00000005"
    assert list_updates(run.folder) == [2, 5]


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_all_files_have_the_permissions_that_the_user_gives_new_ones(tmp_path, umask):
    before = os.umask(umask)
    try:
        run = Run(tmp_path / "run")
        run.save(1)
        run.checkpoints.publish_weights(1)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "ema.safetensors", "optimizer.pt", "state.json"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
