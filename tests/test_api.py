"""The trainer from Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from PIL import Image

from accel_train.api import evaluate, export, load_run, preview, report, train
from accel_train.errors import UserError

SMALL = {"base": "digits", "epochs": 1, "data": {"train_limit": 400, "test_limit": 60}, "optim": {"lr": 1e-2}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that another process has trained, after one with other settings: nothing of that one is left."""
    folder = tmp_path_factory.mktemp("runs")
    script = f"""
from accel_train.api import train
other = train({{**{SMALL!r}, "batch_size": 32, "micro_batch_size": 8, "bitwise": True, "seed": 3}}, "--epochs", "2")
print(other)
print(train({SMALL!r}, "--output-dir", "second"))
"""
    done = helpers.python("-c", script, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "runs/notebook").is_dir()
    return folder / "second"


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, accel_train.api; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=helpers.environment()).returncode == 0


@pytest.mark.ci
def test_it_trains_what_the_command_line_trains(run: Path, tmp_path: Path) -> None:
    words = ["digits", "--epochs", 1, "--data.train-limit", 400, "--data.test-limit", 60, "--optim.lr", "1e-2"]
    assert helpers.run(*words, "--output-dir", tmp_path / "run").returncode == 0
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


def test_a_run_is_loaded_with_its_transform_classes_and_figures(run: Path, tmp_path: Path) -> None:
    loaded = load_run(run)
    assert loaded.classes == tuple("0123456789")
    assert not loaded.model.training
    images = helpers.write_digits(tmp_path)
    inputs = torch.stack([loaded.transform(path) for path in images])
    assert inputs.shape == (len(images), 1, 8, 8)
    assert torch.equal(loaded.transform(Image.open(images[0])), inputs[0])
    with torch.inference_mode():
        probabilities = loaded.model(inputs).softmax(1)
    found = loaded.predict(map(str, images), top_k=3)
    assert [each.image for each in found] == images
    for row, prediction in zip(probabilities, found, strict=True):
        values, labels = row.topk(3)
        assert prediction.classes == tuple(loaded.classes[label] for label in labels)
        assert prediction.probabilities == pytest.approx(values.tolist(), abs=1e-6)
    rows = loaded.rows("eval")
    assert [row["split"] for row in rows] == ["train", "test"]
    assert loaded.result is not None
    assert loaded.result["test_accuracy"] == rows[-1]["accuracy"]
    assert load_run(run, checkpoint="update-00000009").weights.parent.name == "update-00000009"


def test_evaluate_returns_what_the_command_line_prints_and_writes(run: Path) -> None:
    """The files of an earlier evaluation, with other figures, stay as they are."""
    assert helpers.python("-m", "accel_train", "evaluate", run, "--split", "train").returncode == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = evaluate(run, split="train", keep_predictions=True)
    evaluate(run, "--data.train-limit", "30", split="train")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    written = json.loads(before[run / "evaluation-train.json"])
    assert result.metrics | {"time": written["time"]} == written
    assert result.predictions is not None
    right = (result.predictions["logits"].argmax(1) == result.predictions["labels"]).mean()
    assert right == pytest.approx(result.metrics["model"]["accuracy"])


@pytest.mark.ci
def test_export_and_report_return_what_they_have_written(run: Path, tmp_path: Path) -> None:
    exported = export(run, "pt2", output=tmp_path / "export")
    assert exported == tmp_path / "export"
    assert sorted(file.name for file in exported.iterdir()) == ["model.pt2", "preprocess.json"]
    with pytest.raises(UserError, match="is not empty"):
        export(run, "pt2", output=run)
    assert evaluate(run).keep(run, None) == []
    page = report(run, output=tmp_path / "page.html")
    assert page.path == tmp_path / "page.html" and page.path.is_file()
    assert report(run, run, output=page.path).tables == ()  # one run, and no comparison of it with itself
    shutil.copytree(run, tmp_path / "copy")
    assert report(run, tmp_path / "copy", output=page.path).tables[0].title == "runs"


def test_evaluate_returns_the_same_on_each_process_and_again(run: Path, tmp_path: Path) -> None:
    script = f"""
import json, os
from accel_train.api import evaluate
for words in ((), ("--data.test-limit", "30")):
    result = evaluate({str(run)!r}, *words)
    told = json.dumps([result.metrics["model"]["count"], result.metrics])
    os.write(1, f"told: {{told}}\\n".encode())  # in one piece: both processes write to one pipe
"""
    found = told(helpers.python("-c", script, cwd=tmp_path, processes=2))
    assert sorted(count for count, _ in found) == [30, 30, 60, 60]
    assert all(figures == other for count, figures in found for number, other in found if count == number)


@pytest.mark.ci
def test_a_training_whose_end_cannot_be_saved_raises_what_the_command_line_says(tmp_path: Path) -> None:
    script = f"""
import resource
from pathlib import Path
from accel_train.api import train
from accel_train.errors import UserError

def attempt(name):
    try:
        train({SMALL!r}, "--output-dir", name)
        print("returned")
    except UserError as error:
        print("raised:", error)

for name in ("result.json", "model.safetensors"):
    Path(name, name).mkdir(parents=True)
    attempt(name)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # less than a checkpoint
attempt("full")
attempt("full")
"""
    done = helpers.python("-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("raised: ", "returned"))]
    assert len(said) == 4, done.stdout
    assert said[0].startswith("raised: result.json/result.json could not be written: the run is not finished.")
    assert said[1].startswith("raised: the final weights are only in model.safetensors/checkpoints: ")
    kept = "Kept: nothing, because there is no checkpoint."
    assert said[2].startswith(f"raised: The final weights could not be saved: the run is not finished. {kept}")
    assert "--output-dir full" in said[2]
    assert said[3] == said[2]


def test_mistakes_are_raised(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        train({"base": "digits", "epoch": 3, "optim": {"lr": "fast"}})
    assert "Did you mean 'epochs'?" in str(raised.value)
    assert "--optim.lr: expected a number, found 'fast' (the settings:" in str(raised.value)
    with pytest.raises(UserError, match="expected words, numbers and lists"):
        train({"base": "digits", "epochs": object()})
    with pytest.raises(UserError, match="not a run, because it has no config"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"images: expected a list of paths, found one: give \['none.png'\]"):
        load_run(run).predict("none.png")
    with pytest.raises(UserError, match="expected the folder of a run"):
        report()
    with pytest.raises(UserError, match="images: expected at least 1, found 0"):
        preview("digits", images=0)
    with pytest.raises(UserError, match="a name for each"):
        train("digits", metrics={"": lambda logits, targets: 1.0})
    (unreadable,) = load_run(run).predict([tmp_path / "none.png"])
    assert (unreadable.classes, unreadable.error) == ((), "No such file or directory")
    with pytest.raises(UserError, match="cannot be read"):
        load_run(run).transform(tmp_path / "none.png")
    with pytest.raises(UserError, match=r"torch.uint8, found torch.float32"):
        load_run(run).transform(torch.zeros(1, 8, 8))


def test_a_training_in_a_thread_is_refused(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match="train was called in a thread"):
        pool.submit(train, "digits", output_dir=str(tmp_path / "run")).result()
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_a_notebook_trains_on_two_processes(tmp_path: Path) -> None:
    script = f"""
from accelerate import notebook_launcher
from accel_train.api import load_run, train
notebook_launcher(train, ({SMALL!r}, "--output-dir", "run"), num_processes=2, use_port="{helpers.free_port()}")
run = load_run("run")
print(len(run.rows("eval")), run.result["world_size"])
"""
    done = helpers.python("-c", script, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 2"
    told = [line.partition("loss")[0] for line in lines if line.startswith("epoch")]
    assert told and len(told) == len(set(told))  # by one process alone


def told(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """What the processes of a script say that `train` returned."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("told: ")]


TELL = """
import json, os, signal, threading, time
from pathlib import Path
from accel_train.api import load_run, train
def tell(result):
    figures = {name: result.metrics.get(name) for name in ("epochs", "updates", "test_accuracy")}
    told = json.dumps([str(result.directory), result.finished, result.stopped_by, figures])
    os.write(1, f"told: {told}\\n".encode())  # in one piece: all processes write to one pipe
"""


@pytest.mark.ci
def test_train_says_whether_a_signal_has_stopped_it_and_the_same_call_finishes_the_run(tmp_path: Path) -> None:
    script = f"""{TELL}
def warn():
    while not Path("run/status.json").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
again = ({SMALL!r}, "--output-dir", "run", "--epochs", "40")
if not Path("run").exists():
    threading.Thread(target=warn).start()
    tell(train(*again))
else:
    tell(train(*again))
    result = train(*again)
    tell(result)
    assert result.nothing_left and Path(result) == Path("run") and (result.directory / "result.json").is_file()
    assert load_run(result).result == result.metrics
"""
    (stopped,) = told(helpers.python("-c", script, cwd=tmp_path))
    finished, again = told(helpers.python("-c", script, cwd=tmp_path))
    assert stopped[:3] == ["run", False, "SIGUSR1"] and 0 < stopped[3]["updates"] < finished[3]["updates"] == 360
    assert finished[:3] == ["run", True, "epochs"] and 0 < finished[3]["test_accuracy"] <= 1
    assert again == finished


def test_each_process_is_told_the_same(tmp_path: Path) -> None:
    """Without --output-dir they train in one new folder. A limit of time finishes a run; the file STOP does not."""
    script = f"""{TELL}
tell(result := train({SMALL!r}, "--epochs", "99", "--stop.hours", "1e-6"))
tell(train({{**{SMALL!r}, "seed": 1}}, "--output-dir", "stop"))
"""
    (tmp_path / "stop").mkdir()
    (tmp_path / "stop/STOP").touch()
    found = told(helpers.python("-c", script, cwd=tmp_path, processes=2))
    late, stopped = ([each for each in found if each[1] is finished] for finished in (True, False))
    assert len(late) == len(stopped) == 2 and late[0] == late[1] and stopped[0] == stopped[1]
    assert late[0][0].startswith("runs/notebook/") and late[0][2] == "hours" and late[0][3]["epochs"] == 1
    assert stopped[0][2] == "the file STOP" and stopped[0][3]["updates"] > 0
