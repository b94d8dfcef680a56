"""A run is resumed with changed settings or after its end; damaged files in its directory do not stop it."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch

from accel_train.checkpoint.directory import checkpoint_path, delete_checkpoint, list_updates
from accel_train.checkpoint.train_state import TrainState
from accel_train.config.schema import Config, Optim, Schedule, to_yaml
from accel_train.data.order.plan import Plan
from accel_train.errors import UserError
from accel_train.files import sha256
from accel_train.launch.environment import Launch
from accel_train.optim.schedule import create_schedule
from accel_train.ownership.lease import Lease
from accel_train.run.finished import find_finished_run

SAMPLES, BATCH = 1438, 48  # of digits; 30 updates an epoch
TIMES = {"train_seconds", "images_per_second", "warm_up_seconds", "wall_seconds", "cost", "generation"}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two epochs, with many checkpoints. Copy it to change it."""
    run = tmp_path_factory.mktemp("done") / "run"
    ended = helpers.run(
        "digits", "--epochs", 2, "--checkpoint.every-updates", 8, "--checkpoint.keep", 20, "--output-dir", run
    )
    assert ended.returncode == 0, ended.stderr
    return run


def copied(done: Path, run: Path, until: int | None = None) -> Path:
    """Return a copy of the run; `until`: as if it had been killed after that update."""
    shutil.copytree(done, run)
    if until is not None:
        for name in ("result.json", "model.safetensors"):
            (run / name).unlink()
        for update in list_updates(run / "checkpoints"):
            if update > until:
                delete_checkpoint(run / "checkpoints", update)
    return run


def lines(run: Path, kind: str, split: str | None = None) -> list[dict[str, Any]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind and line.get("split") == split]


def result(run: Path, name: str = "result.json") -> dict[str, Any]:
    found = json.loads((run / name).read_text())
    return {key: value for key, value in found.items() if key not in TIMES}


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def altered(checkpoint: Path, **train: Any) -> None:
    """Alter a checkpoint's state.json, and its manifest."""
    file = checkpoint / "state.json"
    state = json.loads(file.read_text())
    state["train"] |= train
    file.write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": file.stat().st_size, "sha256": sha256(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_another_batch_size_in_the_middle_of_an_epoch(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)  # 480 samples of epoch 2
    words = ("digits", "--epochs", 3, "--batch-size", 96, "--log-every-updates", 1)
    words += ("--allow-change", "batch-size", "epochs", "--output-dir", run)
    ended = helpers.run(*words, processes=2)
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in lines(run, "eval", "train")] == [SAMPLES] * 3
    assert (result(run)["updates"], result(run)["epochs"]) == (40 + 10 + 15, 3)
    newest = json.loads((checkpoint_path(run / "checkpoints", 65) / "state.json").read_text())
    assert newest["train"]["samples_seen"] == 3 * SAMPLES

    # The third epoch has the rates of the third epoch of a run that always had this batch size.
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.05)
    schedule = create_schedule(Schedule(name="cosine"), optimizer, epochs=3, updates_per_epoch=15)
    for line in lines(run, "train")[-15:]:
        schedule.step_update(line["update"] - 65 + 45 - 1)
        assert line["lr"] == optimizer.param_groups[0]["lr"]


def test_other_samples_wait_for_the_epochs_end(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    before = contents(run)
    words = ("digits", "--epochs", 3, "--data.train-limit", 500, "--allow-change", "data", "epochs")
    refused = helpers.run(*words, "--output-dir", run)
    assert refused.returncode == 2, refused.stdout
    (error,) = refused.stderr.splitlines()
    assert "is in the middle of epoch 2" in error and "1438 -> 500 training samples" in error
    assert contents(run) == before
    # The way that the message shows.
    named = error.partition("--resume ")[2].removesuffix(".")
    assert named == str(run / "checkpoints" / "update-00000030")
    ended = helpers.run(*words, "--resume", named, "--output-dir", tmp_path / "new")
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in lines(tmp_path / "new", "eval", "train")] == [500, 500]
    assert result(tmp_path / "new")["updates"] == 30 + 2 * 11


def test_a_place_that_does_not_fit_what_was_counted_is_refused(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run", until=40)
    altered(checkpoint_path(run / "checkpoints", 40), epoch_samples=480 - BATCH)  # one window twice
    ended = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert f"has {SAMPLES} samples: update 40 is not in epoch 2 of it" in ended.stderr
    assert not (run / "result.json").exists()


@pytest.mark.parametrize(
    ("count", "left_out", "position", "drop_last", "right"),
    [
        (100, 0, 100, False, True),
        (90, 0, 90, True, True),
        (70, 30, 100, False, True),
        (60, 30, 90, True, True),
        (0, 0, 0, False, False),
        (90, 0, 90, False, False),
        (60, 0, 60, True, False),
        (100, 0, 90, True, False),
        (70, 0, 100, False, False),
        (130, 0, 130, False, False),
    ],
)
def test_an_epoch_is_all_of_the_data(count: int, left_out: int, position: int, drop_last: bool, right: bool) -> None:
    state = TrainState(epoch_count=count, epoch_left_out=left_out, epoch_samples=position)
    plan = Plan(100, 30, 1, 1, drop_last)
    if right:
        state.check_epoch(plan)
    else:
        with pytest.raises(RuntimeError, match="but the training data has 100"):
            state.check_epoch(plan)


def test_a_finished_run_goes_on_to_a_later_end(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "a run")
    before = contents(run)
    words = ("digits", "--output-dir", run, "--epochs", 4, "--batch-size", 96, "--allow-change", "batch-size")
    refused = helpers.run(*words)
    assert refused.returncode == 2, refused.stdout
    (error,) = refused.stderr.splitlines()
    assert "finished run of 2 epochs" in error and "epochs: 2 -> 4; batch-size: 48 -> 96" in error
    assert error.endswith("--allow-change batch-size epochs")
    assert contents(run) == before

    program, _, command = error.partition(": error: ")[2].partition("its result is kept): ")[2].partition(" train ")
    assert program.endswith(("accel-train", "accel_train"))
    ended = helpers.run(*shlex.split(command))
    assert ended.returncode == 0, ended.stderr
    assert [line["count"] for line in lines(run, "eval", "train")] == [SAMPLES] * 4
    assert (result(run)["epochs"], result(run)["updates"]) == (4, 60 + 2 * 15)
    after = contents(run)
    for name, suffix in (("result", ".json"), ("model", ".safetensors")):
        assert after[f"{name}-epoch-2{suffix}"] == before[f"{name}{suffix}"] != after[f"{name}{suffix}"]

    again = helpers.run(*shlex.split(command), "--data.workers", 1)
    assert again.returncode == 0 and "Nothing is left to do" in again.stdout
    assert contents(run) == after


def test_damaged_files_are_set_aside_and_the_run_ends_as_it_did(done: Path, tmp_path: Path) -> None:
    run = copied(done, tmp_path / "run")
    good = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    bad = [
        b"\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b'{"update": 3}\n',
        b'{"kind": "train", "update": "3"}\n',
        b"[" * 9999 + b"\n",
    ]
    (run / "metrics.jsonl").write_bytes(b"".join([*good[:3], *bad, *good[3:]]))
    for name in ("result.json", "status.json", "model.json", "environment.json"):
        (run / name).write_bytes(b"[1]\xff")
    ended = helpers.run("digits", "--epochs", 2, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "result.json is damaged and renamed to result.json.damaged" in ended.stderr
    assert "metrics.jsonl: 6 damaged lines moved to metrics.damaged.jsonl" in ended.stderr
    assert (run / "metrics.damaged.jsonl").read_bytes() == b"".join(bad)
    assert [line["count"] for line in lines(run, "eval", "train")] == [SAMPLES] * 2
    assert [line["update"] for line in lines(run, "train")] == [line["update"] for line in lines(done, "train")]
    assert (run / "result.json.damaged").read_bytes() == b"[1]\xff"
    assert result(run) == result(done)
    for name in ("status.json", "model.json", "environment.json"):
        json.loads((run / name).read_text())


def test_a_finished_run_is_taken_to_another_directory(done: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = helpers.run("digits", "--epochs", 2, "--resume", done / "checkpoints", "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert (run / "model.safetensors").read_bytes() == (done / "model.safetensors").read_bytes()
    assert list_updates(run / "checkpoints") == [60]
    assert result(run) == result(done)
    assert lines(run, "train") == []


class TestEarlierEnd:
    """Reading result.json, without starting a program."""

    CONFIG = Config(recipe="mine", epochs=3, optim=Optim(lr=0.2))

    def finished(self, run: Path, **values: Any) -> Path:
        """As older versions left it: without settings."""
        (run / "checkpoints" / "update-00000009").mkdir(parents=True)
        (run / "config.yaml").write_text(to_yaml(self.CONFIG))
        (run / "result.json").write_text(json.dumps({"recipe": "mine", "epochs": 3, "updates": 9, **values}))
        return run

    def test_no_result(self, tmp_path: Path) -> None:
        assert find_finished_run(tmp_path / "nothing", self.CONFIG, Launch()) is None

    def test_an_older_result_is_of_the_runs_configuration(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        found = find_finished_run(run, self.CONFIG, Launch())
        assert found is not None and found.nothing_left
        with pytest.raises(UserError, match=r"3 epochs.*: seed: 0 -> 1\. Give another --output-dir \(or more epochs"):
            find_finished_run(run, Config(recipe="mine", epochs=3, optim=Optim(lr=0.2), seed=1), Launch())

    def test_another_recipes_result(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path, recipe="other")
        with pytest.raises(UserError, match="is of the recipe 'other'"):
            find_finished_run(run, self.CONFIG, Launch())
        settings = {"data.name": "mnist", "epochs": 3}
        run = self.finished(tmp_path / "newer", recipe="other", settings=settings)
        with pytest.raises(UserError, match=r"data\.name: mnist -> digits") as error:
            find_finished_run(run, self.CONFIG, Launch())
        assert "allow-change" not in str(error.value)

    def test_an_older_result_without_a_configuration(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        (run / "config.yaml").write_text("- 1")
        with pytest.raises(UserError, match=r"does not say which settings it belongs to.*config\.yaml"):
            find_finished_run(run, self.CONFIG, Launch())

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"[1]", b"\xff", b"[" * 9999, b'{"recipe": "mine", "epochs": "3", "updates": 9}']
    )
    def test_a_damaged_one_is_set_aside_only_if_there_are_checkpoints(self, tmp_path: Path, content: bytes) -> None:
        run = self.finished(tmp_path)
        (run / "result.json").write_bytes(content)
        found = find_finished_run(run, self.CONFIG, Launch())
        assert found is not None and not found.nothing_left
        assert (run / "result.json").exists()  # nothing is touched before it is certain that the run goes on
        found.rename_results(Lease(run, None))
        assert (run / "result.json.damaged").read_bytes() == content
        (run / "result.json").write_bytes(content)
        (run / "checkpoints" / "update-00000009").rmdir()
        with pytest.raises(UserError, match="is damaged, and there are no checkpoints"):
            find_finished_run(run, self.CONFIG, Launch())

    def test_checkpoints_that_are_gone(self, tmp_path: Path) -> None:
        run = self.finished(tmp_path)
        (run / "checkpoints" / "update-00000009").rmdir()
        config = Config(recipe="mine", epochs=4, optim=Optim(lr=0.2), allow_change=("epochs",))
        with pytest.raises(UserError, match=r"epochs: 3 -> 4\. It cannot go on, because its checkpoints are gone"):
            find_finished_run(run, config, Launch())
