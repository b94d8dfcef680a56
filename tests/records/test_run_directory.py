"""The run directory: complete files, valid lines, and a run that continues on a full disk."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch

from accel_train.config.options import parse
from accel_train.config.schema import Config, Optim
from accel_train.errors import UserError
from accel_train.files import read_json_lines
from accel_train.records import directory as run
from accel_train.records.directory import RunDirectory, environment
from accel_train.records.model_info import ModelInfo, read_model_info

MODEL_INFO = ModelInfo(("cat", "dög"), 3, 32, None, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


def read_lines(path: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_begin_writes_a_config_that_starts_the_same_run_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "a" / "b", writes=True)
    config = Config(recipe="mine", optim=Optim(lr=3e-4), trackers=("x",))
    directory.begin(config, MODEL_INFO, environment(2, ["cpu", "cpu"]), {})
    found = parse([str(tmp_path / "a" / "b" / "config.yaml")])
    assert (found.recipe, found.optim, found.trackers) == ("mine", config.optim, config.trackers)
    assert read_model_info(directory.path) == MODEL_INFO
    written = json.loads((directory.path / "environment.json").read_text())
    assert written["packages"]["torch"] == torch.__version__
    assert (written["world_size"], written["devices"]) == (2, ["cpu", "cpu"])


def test_the_environment_tells_the_launcher_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("RANK", "SLURM_JOB_ID", "ACCELERATE_MIXED_PRECISION", "NCCL_IB_HCA", "PBS_JOBID", "FSDP_VERSION",
             "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES")  # fmt: skip
    others = ("SLURM_JWT", "HOME_SWEET", "ACCELERATE_MY_PASSWD", "NCCL_CRED", "PBS_O_AUTH", "SLURM_SPANK_AWS_ACCESS",
              "PMI_FD", "OMPI_COMM_WORLD_CONNECT", "FSDP_X", "AWS_ACCESS_KEY_ID", "SLURM_SPANK_x")  # fmt: skip
    for name in known + others:
        monkeypatch.setenv(name, "7")
    launcher = environment(1, ["cpu"])["launcher"]
    assert set(known) <= set(launcher)
    assert not set(others) & set(launcher)


def test_metrics_are_strict_json(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=True)
    directory.log("train", loss=math.nan, lr=math.inf, accuracy=torch.tensor(0.5), count=np.int64(3))
    directory.log("eval", per_class=torch.tensor([1, 2]), nested={"a": [np.float32(0.25), -math.inf]}, path=tmp_path)
    directory.log("event", text="two\nlines, \u2028 and \udcff", update=3)
    train, evaluation, event = read_lines(directory.metrics_path)
    assert (train["kind"], train["loss"], train["lr"]) == ("train", None, None)
    assert (train["accuracy"], train["count"]) == (0.5, 3)
    assert evaluation["per_class"] == [1, 2]
    assert evaluation["nested"] == {"a": [0.25, None]}
    assert evaluation["path"] == str(tmp_path)
    assert event["text"] == "two\nlines, \u2028 and \udcff"


@pytest.mark.parametrize("torn", ['{"kind": "tra', '{"a": 1}\n\0\0\0\0', "{}", '\n{"kind"\n', "3\n"])
def test_a_torn_end_is_cut_off_when_the_run_goes_on(tmp_path: Path, torn: str) -> None:
    directory = RunDirectory(tmp_path, writes=True)
    directory.log("train", update=1)
    with directory.metrics_path.open("a") as file:
        file.write(torn)
    RunDirectory(tmp_path, writes=False)
    assert directory.metrics_path.read_text().endswith(torn)  # only the writer mends
    RunDirectory(tmp_path, writes=True).log("train", update=2)
    updates = [line.get("update") for line in read_lines(directory.metrics_path)]
    assert updates == [1, *([None] if torn.startswith('{"a"') else []), 2]


def test_lines_of_what_is_done_again_are_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=True)
    for update in (5, 10, 15):
        directory.log("train", update=update)
    directory.log("eval", update=15, epoch=1)
    directory.log("event", text="killed", update=15)
    directory.remove_lines_after(10)
    assert [(line["kind"], line["update"]) for line in read_lines(directory.metrics_path)] == [
        ("train", 5),
        ("train", 10),
        ("event", 15),
    ]


def test_damaged_lines_stay_and_readers_leave_them_out(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=True)
    directory.log("train", update=1)
    good = directory.metrics_path.read_bytes()
    bad = [b"\n", b"\xff\n", b"{}\n", b'{"kind": 3}\n', b'{"kind": "eval", "epoch": null}\n']
    directory.log("train", update=9)
    again = directory.metrics_path.read_bytes().removeprefix(good)
    directory.metrics_path.write_bytes(b"".join([*bad, good, *bad, again, good]))
    RunDirectory(tmp_path, writes=True).remove_lines_after(5)
    assert directory.metrics_path.read_bytes() == b"".join([*bad, good, *bad, good])
    assert [line["update"] for line in read_json_lines(directory.metrics_path, "train")] == [1, 1]


@pytest.mark.parametrize("content", [b"[1]", b"\xff", b"", b"[" * 9999])
def test_a_damaged_status_does_not_hide_a_failure(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    RunDirectory(tmp_path, writes=False).fail("out of memory")
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "out of memory")


def test_status_is_renewed_by_time_state_or_force(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, writes=True)

    def written() -> dict[str, object]:
        found: dict[str, object] = json.loads((tmp_path / "status.json").read_text())
        return found

    directory.status("training", epoch=1, update=1)
    first = written()
    assert (first["state"], first["update"], first["pid"]) == ("training", 1, os.getpid())
    directory.status("training", update=2)
    assert written() == first
    directory.status("training", force=True)
    assert written()["update"] == 2
    directory.status("interrupted")
    assert (written()["state"], written()["epoch"], written()["update"]) == ("interrupted", 1, 2)
    directory._status_time -= run.STATUS_SECONDS
    directory.status("interrupted", update=3)
    assert written()["update"] == 3


def test_a_result_finishes_the_run(tmp_path: Path) -> None:
    RunDirectory(tmp_path, writes=False).result({"test_accuracy": 0.25})
    RunDirectory(tmp_path, writes=True).result({"test_accuracy": 0.5, "test_loss": math.nan})
    assert json.loads((tmp_path / "result.json").read_text()) == {"test_accuracy": 0.5, "test_loss": None}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]


def test_a_result_is_on_the_disk_before_it_finishes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = helpers.record_disk_calls(monkeypatch)
    RunDirectory(tmp_path, writes=True).result({"test_accuracy": 0.5})
    assert [(what, name[:12]) for what, name in calls] == [("fsync", ".result.json"), ("rename", "result.json")]


def test_a_process_that_does_not_write_leaves_no_trace(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run", writes=False)
    directory.begin(Config(), MODEL_INFO, {}, {})
    directory.log("train", update=1)
    directory.log("event", text="x")
    directory.status("training")
    directory.remove_lines_after(0)
    directory.result({})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        RunDirectory(tmp_path / "file", writes=True)
    with pytest.raises(UserError, match="Not a directory"):
        RunDirectory(tmp_path / "file" / "run", writes=True)
    with pytest.raises(UserError, match="cannot be written"):  # also root cannot write there
        RunDirectory(Path("/proc/self/run"), writes=True)
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory(Path("/proc/self"), writes=True)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from accel_train.records.directory import RunDirectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
directory = RunDirectory(Path(sys.argv[1]), writes=True)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for update in range(30):
    directory.log("train", update=update)
full = directory.failures
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
directory.log("train", update=99)
directory.status("training")
print(full, directory.failures)
"""


@pytest.mark.ci
def test_a_full_disk_costs_neither_the_run_nor_a_line(tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk: the kernel writes part of a line, then refuses."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    full, failures = map(int, done.stdout.split())
    assert full == failures > 0
    assert done.stderr.count("warning") == 1
    assert "metrics.jsonl cannot be written (File too large)" in done.stderr
    updates = [line["update"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert updates == [*range(30), 99]  # those that failed were written later
    assert json.loads((tmp_path / "status.json").read_text())["failed_writes"] == failures


WRITER = """
import sys
from pathlib import Path
from accel_train.records.directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]), writes=True)
for update in range(10**9):
    directory.log("train", update=update)
    directory.status("training", force=True, update=update)
"""


def test_whatever_moment_the_writer_is_killed_at_its_files_are_whole(tmp_path: Path) -> None:
    for attempt in range(5):
        (tmp_path / "status.json").unlink(missing_ok=True)
        with (tmp_path / "output").open("wb") as output:
            writer = helpers.forked(["-c", WRITER, tmp_path], 1, helpers.environment(), output, output)
        while not (tmp_path / "status.json").exists():
            assert writer.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.01)
        time.sleep(0.05 + 0.013 * attempt)
        for _ in range(20):  # a reader never sees a part of a status
            if (tmp_path / "status.json").exists():
                json.loads((tmp_path / "status.json").read_text())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        RunDirectory(tmp_path, writes=True)
        lines = read_lines(tmp_path / "metrics.jsonl")
        assert lines
        assert json.loads((tmp_path / "status.json").read_text())["state"] == "training"


def test_lines_that_will_be_done_again_are_not_there_twice_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = RunDirectory(tmp_path, writes=True)
    for update in (1, 2, 3):
        first.log("train", update=update)
    path = tmp_path / "metrics.jsonl"
    again = RunDirectory(tmp_path, writes=True)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(again.lease, "write", full)
        again.remove_lines_after(1)
        again.log("train", update=2)
        again.remove_lines_after(1)
        again.log("train", update=2)
        assert path.read_bytes().count(b'"update": 2') == 1
    assert f"{path} cannot be written (No space left on device)" in capsys.readouterr().err
    again.log("train", update=3)
    assert [line["update"] for line in read_lines(path) if "update" in line] == [1, 2, 3]


def test_links_in_a_run_directory_are_not_written_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious, path = tmp_path / "precious", tmp_path / "run"
    directory = RunDirectory(path, writes=True)
    directory.log("train", update=1)
    precious.write_text("precious")
    (path / "status.json").symlink_to(precious)
    directory.status("training")
    assert not (path / "status.json").is_symlink()
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").symlink_to(precious)
    directory.log("train", update=2)
    assert "metrics.jsonl cannot be written (a link, not a regular file)" in capsys.readouterr().err
    assert directory.failures == 1
    with pytest.raises(UserError, match=r"metrics\.jsonl is a link, not a regular file"):
        RunDirectory(path, writes=True)
    assert precious.read_text() == "precious"
    (tmp_path / "here").symlink_to("run")
    (path / "metrics.jsonl").unlink()
    RunDirectory(tmp_path / "here", writes=True).log("train", update=2)
    assert (path / "metrics.jsonl").read_text()
