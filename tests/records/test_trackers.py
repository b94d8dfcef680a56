"""Trackers: each curve has one meaning, a run continues under one id, and no step is there twice."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
from accelerate import PartialState
from fake_trackers import FakeMLflow, FakeWandB
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accel_train.cli import main
from accel_train.config.schema import Config
from accel_train.records import trackers
from accel_train.records.directory import RunDirectory
from accel_train.records.trackers import Point, Trackers, point_of

Curves = dict[str, list[tuple[int, float]]]
CONFIG = Config(recipe="digits", epochs=2)


@pytest.fixture(autouse=True)
def state() -> Iterator[None]:
    PartialState(cpu=True)
    yield
    helpers.forget_accelerate()


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers, "check_trackers", lambda names, option: None)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setattr(trackers, "check_trackers", lambda names, option: None)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS"):
        monkeypatch.delenv(name, raising=False)
    return fake


def tensorboard(run: Path) -> Curves:
    """The curves as TensorBoard shows them."""
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def curves_of(run: Path) -> Curves:
    """The curves in metrics.jsonl."""
    found: Curves = {}
    for point in filter(None, map(point_of, helpers.lines_of(run))):
        for name, value in point.values.items():
            found.setdefault(name, []).append((point.step, value))
    return found


def assert_same(shown: Curves, run: Path) -> None:
    """Each line of metrics.jsonl is there, once, and nothing beside them."""
    expected = curves_of(run)
    assert shown.keys() == expected.keys()
    for name, values in expected.items():
        assert [step for step, _ in shown[name]] == [step for step, _ in values], name
        assert [value for _, value in shown[name]] == pytest.approx([value for _, value in values]), name


def test_each_curve_has_one_meaning() -> None:
    values = {"epoch": 1, "update": 30, "time": 5.0, "seconds": 2.0, "loss": 0.5}
    train = point_of({"kind": "train", **values, "lr": 0.1, "images_per_second": 9.0, "data_wait_fraction": None})
    assert train == Point(30, 1, 5.0, {"train/loss": 0.5, "lr": 0.1, "speed/images_per_second": 9.0})
    for split, weights, name in (
        ("train", "model", "train_epoch"),
        ("val", "model", "val"),
        ("val", "ema", "val_ema"),
        ("test", "ema", "test_ema"),
    ):
        line = point_of({"kind": "eval", **values, "split": split, "weights": weights, "count": 7})
        assert line is not None and line.values == {f"{name}/loss": 0.5}
    assert point_of({"kind": "event", "update": 3}) is None


@pytest.mark.ci
def test_tensorboard_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    """SIGKILL with lines after the last checkpoint; the run repeats these updates, and TensorBoard shows each once."""
    run = tmp_path / "run"
    words = ["digits", "--epochs", 2, "--log-every-updates", 2, "--trackers", "tensorboard", "--data.val-fraction", 0.1]
    with helpers.started(run, *words, "--checkpoint.every-updates", 20) as killed:

        def is_after_the_checkpoint() -> bool:
            lines = helpers.lines_of(run) if (run / "metrics.jsonl").exists() else []
            return (run / "checkpoints" / "update-00000020").exists() and max(x.get("update", 0) for x in lines) >= 24

        killed.until(is_after_the_checkpoint)
        killed.popen.send_signal(signal.SIGKILL)
        killed.ended()
    assert not (run / "result.json").exists()
    ended = helpers.run(*words, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    assert "continuing after update" in ended.stdout
    assert_same(tensorboard(run), run)
    assert len(list((run / "tensorboard").glob("events.*"))) == 2

    # A replay begins again, and shows the same; also the second one.
    for _ in range(2):
        assert main(["track", str(run), "--to", "tensorboard"]) == 0
        assert_same(tensorboard(run), run)
    (run / "trackers.json").write_text('{"tensorboard": {"sent": "much"}}')  # damaged: all is sent again, and replaced
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    assert_same(tensorboard(run), run)


class Training:
    """A run that logs like the training: starts, updates and checkpoints; without its end it is as if killed."""

    def __init__(self, run: Path, names: list[str], update: int = 0) -> None:
        self.directory = RunDirectory(run, writes=True)
        if not (run / "config.yaml").exists():
            (run / "config.yaml").write_text("about: {recipe: digits}\nepochs: 2\n")
        if update == 0:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
        self.directory.remove_lines_after(update, update % 10 == 0)
        self.trackers = Trackers(dataclasses.replace(CONFIG, trackers=tuple(names)), run)
        self.trackers.begin(resumed=update > 0)
        self.update = update

    def train(self, updates: int, offset: float = 0.0) -> Training:
        for _ in range(updates):
            self.update += 1
            epoch = (self.update - 1) // 10 + 1
            where = {"epoch": epoch, "update": self.update}
            self._log("train", **where, loss=offset + self.update, lr=0.1)
            if self.update % 10 == 0:
                self._log("eval", **where, split="val", weights="model", loss=offset + epoch, count=1)
                self.save()
        return self

    def _log(self, kind: str, **values: Any) -> None:
        self.directory.log(kind, **values)

    def save(self) -> Training:
        self._log("checkpoint", epoch=min(self.update // 10 + 1, 2), update=self.update)
        (self.directory.path / "checkpoints" / f"update-{self.update:08}").mkdir(parents=True)
        self.trackers._asked.set()
        return self

    def kill(self) -> None:
        """The trackers have done what they were told, and are never ended."""
        for service in self.trackers._services:
            service.close = lambda: None  # type: ignore[method-assign]
        assert self.trackers.end(20) == []

    def finish(self) -> None:
        result = {"updates": self.update, "test_accuracy": 0.9, "recipe": "digits"}
        self.directory.result(result)
        assert self.trackers.end(60) == []


def trained(run: Path, names: list[str]) -> None:
    """Two epochs of 10 updates: killed after updates 7 and 15, of which 5 and 12 are saved, and replayed in between."""
    Training(run, names).train(5).save().train(2).kill()
    Training(run, names, 5).train(7).save().train(3, offset=100).kill()  # these three come again, with other values
    assert all(main(["track", str(run), "--to", name]) == 0 for name in names)
    Training(run, names, 12).train(8).finish()


@pytest.mark.parametrize("offline", [False, True])
def test_wandb_continues_one_run_and_gets_no_step_twice(tmp_path: Path, wandb: FakeWandB, offline: bool) -> None:
    wandb.offline = offline
    trained(tmp_path / "mine", ["wandb"])
    (found,) = wandb.runs.values()
    assert {(call["project"], call["name"], call["resume"]) for call in wandb.calls} == {("digits", "mine", "allow")}
    assert len(wandb.calls) == 4 and len({call["id"] for call in wandb.calls}) == 1
    assert [row["_step"] for row in found.rows] == list(range(1, 21))
    assert [row["train/loss"] for row in found.rows] == list(range(1, 21))
    assert [(row["_step"], row["val/loss"]) for row in found.rows if "val/loss" in row] == [(10, 1), (20, 2)]
    assert (found.config["optim.lr"], found.config["bitwise"], found.config["model.weights"]) == (0.1, False, None)

    assert main(["track", str(tmp_path / "mine"), "--to", "wandb"]) == 0
    assert len(found.rows) == 20


def test_mlflow_continues_one_run_and_gets_no_step_twice(tmp_path: Path, mlflow: FakeMLflow) -> None:
    trained(tmp_path / "mine", ["mlflow"])
    assert main(["track", str(tmp_path / "mine"), "--to", "mlflow"]) == 0
    (found,) = mlflow.runs.values()
    assert (mlflow.experiments, found.info.run_name) == (["digits"], "mine")
    losses = [(value.step, value.value) for value in found.values if value.key == "train/loss"]
    assert losses == [(step, step) for step in range(1, 21)]
    times = {line["update"]: line["time"] for line in helpers.lines_of(tmp_path / "mine") if line["kind"] == "train"}
    assert next(value.timestamp for value in found.values if value.step == 3) == int(times[3] * 1000)
    assert found.data.params["optim.lr"] == 0.1


def test_another_run_in_the_same_directory_is_another_run(tmp_path: Path, wandb: FakeWandB) -> None:
    Training(tmp_path, ["wandb"]).train(12).kill()
    Training(tmp_path, ["wandb"]).train(20).finish()
    assert [len(found.rows) for found in wandb.runs.values()] == [10, 20]


def test_a_tracker_that_fails_is_warned_of_once_and_the_others_go_on(tmp_path: Path, wandb: FakeWandB) -> None:
    def refuse(**_: Any) -> None:
        raise OSError("api.example cannot be reached\nand more")

    wandb.init = refuse  # type: ignore[method-assign]
    run = tmp_path / "my run"
    training = Training(run, ["wandb", "tensorboard"]).train(5)
    deadline = time.monotonic() + 20
    while not (warnings := training.trackers.warnings()) and time.monotonic() < deadline:
        time.sleep(0.01)
    (warning,) = warnings
    assert "wandb has failed: api.example cannot be reached. The training goes on" in warning
    assert f"accel-train track '{run}' --to wandb" in warning
    training.train(15).finish()
    assert_same(tensorboard(run), run)


def test_a_tracker_that_hangs_is_not_waited_for(tmp_path: Path, wandb: FakeWandB) -> None:
    import threading

    release = threading.Event()
    wandb.log = lambda values, step: release.wait(60)  # type: ignore[assignment]
    training = Training(tmp_path, ["wandb"]).train(12)
    (warning,) = training.trackers.end(0.2)
    release.set()
    assert "the tracker wandb is still sending" in warning


@pytest.mark.parametrize("content", ["", "[1", '{"wandb": 7}', '{"wandb": {"id": 7, "sent": "much"}}'])
def test_a_damaged_trackers_json_ends_nothing(tmp_path: Path, wandb: FakeWandB, content: str) -> None:
    Training(tmp_path, ["wandb"]).train(12).kill()
    (tmp_path / "trackers.json").write_text(content)
    Training(tmp_path, ["wandb"], 10).train(10).finish()  # its id is lost: another run there, which has all steps
    first, second = wandb.runs.values()
    assert [row["_step"] for row in first.rows] == list(range(1, 11))
    assert [row["_step"] for row in second.rows] == list(range(1, 21))


def test_a_failed_replay_says_so(tmp_path: Path, wandb: FakeWandB, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path, []).train(20)
    wandb.init = lambda **_: 1 / 0  # type: ignore[assignment, method-assign]
    assert main(["track", str(tmp_path), "--to", "wandb"]) == 1
    assert capsys.readouterr().err == "accel-train: error: wandb: division by zero. Start it again to send the rest.\n"
    assert main(["track", str(tmp_path / "none"), "--to", "wandb"]) == 2
    assert main(["track", str(tmp_path)]) == 2
    assert "--to" in capsys.readouterr().err


def test_real_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "mine", ["mlflow"])
    assert main(["track", str(tmp_path / "mine"), "--to", "mlflow"]) == 0
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    (found,) = client.search_runs([experiment.experiment_id])
    shown = {
        key: [(value.step, value.value) for value in client.get_metric_history(found.info.run_id, key)]
        for key in found.data.metrics
    }
    assert_same(shown, tmp_path / "mine")
    assert (found.info.run_name, found.info.status, found.data.params["optim.lr"]) == ("mine", "FINISHED", "0.1")


def test_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits_run: Path) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    run = tmp_path / "mine"
    shutil.copytree(digits_run, run)
    for _ in range(2):
        assert main(["track", str(run), "--to", "wandb"]) == 0
    shown: Curves = {}
    records = [record for file in sorted(run.glob("wandb/offline-run-*/*.wandb")) for record in wandb_records(file)]
    runs = {(r.run.run_id, r.run.project, r.run.display_name) for r in records if r.WhichOneof("record_type") == "run"}
    assert runs == {(json.loads((run / "trackers.json").read_text())["wandb"]["id"], "digits", "mine")}
    for record in records:
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            if not name.startswith("_"):
                shown.setdefault(name, []).append((row["_step"], value))
    assert_same(shown, run)


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, block, parts = path.read_bytes(), 7, 32768, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
