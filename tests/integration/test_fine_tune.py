"""Real runs that begin from weights: of a file that timm wrote, of a directory, of the hub, and of another run."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import helpers
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from accel_train.config.schema import Config, Model, Origin
from accel_train.errors import UserError
from accel_train.records.model_info import read_model_info
from accel_train.run.start import find_file

NET = ("digits", "--data.train-limit", 96, "--batch-size", 32, "--optim.lr", 0, "--epochs", 1)
"""A run that learns nothing: its weights are those that it began from."""
RESNET = (*NET, "--model.name", "test_resnet", "--model.image-size", 32)


def resnet(classes: int = 10) -> Any:
    torch.manual_seed(3)
    return timm.create_model("test_resnet.r160_in1k", num_classes=classes)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.pth"
    torch.save(resnet(7).state_dict(), path)
    return path


def refused(ended: Any, message: str) -> None:
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert message in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stderr.count("accel-train: error:") == 1, ended.stderr


@pytest.mark.slow
def test_a_run_needs_its_file_only_once(tmp_path: Path, file: Path) -> None:
    """On two processes; then the file is gone, comes back with other content, or lies elsewhere."""
    run, copy = tmp_path / "run", tmp_path / "copy.pth"
    shutil.copy(file, copy)
    begun = helpers.run(*RESNET, "--model.weights", copy, "--output-dir", run, processes=2)
    assert begun.returncode == 0, begun.stderr
    lines = [line for line in begun.stdout.splitlines() if line.startswith("weights ")]
    assert len(lines) == 1 and "new last layer: 7 classes there, 10 here" in lines[0], begun.stdout
    learned = load_file(run / "model.safetensors")
    # Grey digits: the colours of the first convolution are added.
    assert torch.allclose(learned["conv1.0.weight"], resnet(7).conv1[0].weight.sum(1, keepdim=True), atol=1e-6)
    assert torch.equal(learned["conv1.3.weight"], resnet(7).conv1[3].weight)
    assert read_model_info(run).origin.sha256 == hashlib.sha256(copy.read_bytes()).hexdigest()

    again = (*RESNET, "--epochs", 2, "--allow-change", "epochs", "--output-dir", run)
    copy.rename(tmp_path / "moved.pth")
    gone = helpers.run(*again, "--model.weights", copy)
    assert gone.returncode == 0, gone.stderr
    assert "continuing after update" in gone.stdout and "\nweights " not in gone.stdout
    same = helpers.run(*again, "--model.weights", tmp_path / "moved.pth")
    assert "Nothing is left to do" in same.stdout, same.stderr
    refused(helpers.run(*again, "--model.weights", tmp_path / "mistyped.pth"), "no such file, run or checkpoint")
    enum = helpers.run(*again, "--model.weights", "ResNet50_Weights.IMAGENET1K_V1")
    refused(enum, "--model.name torchvision/NAME.IMAGENET1K_V1 --model.pretrained true")
    torch.save(resnet(3).state_dict(), copy)
    refused(helpers.run(*again, "--epochs", 3, "--model.weights", copy), "model.weights: ")
    # Evaluation needs neither.
    evaluated = helpers.python("-m", "accel_train", "evaluate", run)
    assert evaluated.returncode == 0, evaluated.stderr


@pytest.mark.slow
def test_a_local_directory_of_timms(tmp_path: Path) -> None:
    """Other processes, evaluation and prediction; after the start the directory is not needed any more."""
    folder, run = tmp_path / "net", tmp_path / "run"
    digits = [str(digit) for digit in range(9, -1, -1)]  # the classes of the digits, in another order
    net = timm.create_model("test_resnet", num_classes=10, act_layer="silu")
    timm.models.save_for_hf(net, folder, safe_serialization=True, model_config={"label_names": digits})
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, 32, 32]
    (folder / "config.json").write_text(json.dumps(config))
    words = (*NET, "--model.name", f"local-dir:{folder}", "--model.pretrained", "true")
    words = (*words, "--data.test-limit", 20, "--output-dir", run)
    begun = helpers.run(*words, processes=2)
    assert begun.returncode == 0, begun.stderr
    assert "last layer loaded: the same classes, in another order" in begun.stdout
    learned = load_file(run / "model.safetensors")
    assert torch.equal(learned["fc.weight"], net.fc.weight.flip(0))
    info = read_model_info(run)
    assert (info.image_size, info.mean, info.std) == (32, (0.5,), (0.5,))
    assert '"act_layer": "silu"' in info.origin.architecture
    shutil.rmtree(folder)
    assert "Nothing is left to do" in helpers.run(*words).stdout
    longer = helpers.run(*words, "--epochs", 2, "--allow-change", "epochs")
    assert longer.returncode == 0, longer.stderr
    image = helpers.write_digits(tmp_path, 1)[0]
    for command in (["evaluate", run], ["predict", run, image]):
        done = helpers.python("-m", "accel_train", *command)
        assert done.returncode == 0, done.stderr
    values = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(values | {"origin": {}}))
    refused(helpers.python("-m", "accel_train", "predict", run, image), "does not have the architecture")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an EMA on six images of three classes."""
    root = tmp_path_factory.mktemp("source")
    pictures(root / "data", ("ant", "bee", "cat"))
    ended = helpers.run(*OF_IMAGES, "--data.root", root / "data", "--ema.enabled", "true", "--output-dir", root / "run")
    assert ended.returncode == 0, ended.stderr
    return root / "run"


OF_IMAGES = (
    "digits", "--data.name", "folder", "--data.workers", 0, "--epochs", 1, "--batch-size", 4, "--virtual-batch-size", 4,
    "--model.name", "test_resnet",
)  # fmt: skip


def pictures(root: Path, classes: tuple[str, ...]) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(classes):
            for copy in range(2):
                (root / split / name).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (48, 48), (80 * number, 50, 99 * copy)).save(root / split / name / f"{copy}.png")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (("ant", "bee", "cat"), "last layer loaded: the same classes"),
        (("ant", "bee", "dog"), "new last layer: other classes ('cat' is not here)"),
        (("ant", "bee", "dog", "elk"), "new last layer: 3 classes there, 4 here"),
    ],
)
def test_from_run_to_run(tmp_path: Path, source: Path, classes: tuple[str, ...], said: str) -> None:
    pictures(tmp_path / "data", classes)
    words = (*OF_IMAGES, "--data.root", tmp_path / "data", "--optim.lr", 0, "--model.weights")
    begun = helpers.run(*words, source, "--model.freeze-body", "true", "--output-dir", tmp_path / "run")
    assert begun.returncode == 0, begun.stderr
    assert said in begun.stdout and "ema.safetensors (EMA)" in begun.stdout
    one, other = load_file(source / "ema.safetensors"), load_file(tmp_path / "run" / "model.safetensors")
    equal = {name for name in one if torch.equal(one[name], other[name])}
    assert one.keys() - equal == (set() if classes[-1] == "cat" else {"fc.weight", "fc.bias"})
    assert torch.equal(one["fc.weight"][:2], other["fc.weight"][:2]) == ("new" not in said)
    there, here = read_model_info(source), read_model_info(tmp_path / "run")
    assert (here.mean, here.std, here.image_size) == (there.mean, there.std, there.image_size)


@pytest.mark.slow
def test_what_model_weights_may_name(tmp_path: Path, source: Path) -> None:
    checkpoint = next((source / "checkpoints").glob("update-*"))
    for path, name in ((source, "ema"), (checkpoint, "ema"), (source / "model.safetensors", "model")):
        weights, info = find_file(path)
        assert weights.file.name == f"{name}.safetensors"
        assert weights.classes == ("ant", "bee", "cat") and info is not None
    bare = tmp_path / "other.safetensors"
    shutil.copy(source / "model.safetensors", bare)
    assert (find_file(bare)[0].classes, find_file(bare)[1]) == (None, None)
    with pytest.raises(UserError, match=r"neither a run .* nor a checkpoint"):
        find_file(tmp_path)
    broken = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    (broken / "ema.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is not a complete checkpoint"):
        find_file(broken)


@pytest.mark.ci
def test_bad_weights_are_one_line(tmp_path: Path, file: Path) -> None:
    text = tmp_path / "text.safetensors"
    text.write_text("These are not weights.")
    words = (*RESNET, "--output-dir", tmp_path / "run", "--model.weights")
    refused(helpers.run(*words, text, processes=2), "text.safetensors cannot be read")
    refused(helpers.run(*words, file, "--model.name", "test_vit", "--model.image-size", 32), "is of another model")
    refused(helpers.run(*words, file, "--model.pretrained", "true"), "begins from one of them")


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for the files in `folder`, and counts requests."""

    folder: Path
    asked: list[tuple[str, str]]

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, *, with_content: bool) -> None:
        self.asked.append((self.command, self.path))
        path = self.folder / self.path.rpartition("/")[2]
        if not self.path.startswith("/org/net/resolve/main/") or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "/org/net/" in self.path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    Hub.folder, Hub.asked = tmp_path / "net", []
    timm.models.save_for_hf(resnet(7), Hub.folder, safe_serialization=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_hub_is_asked_once_and_its_cache_is_enough(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    """The hub's libraries read their variables when they are imported: these processes are started anew."""
    words = (*NET, "--model.name", "hf-hub:org/net", "--model.image-size", 32, "--model.pretrained", "true")
    online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    nowhere = online | {"HF_ENDPOINT": "http://127.0.0.1:9"}  # refuses at once; retries would take half a minute
    offline = nowhere | {"HF_HUB_OFFLINE": "1"}

    def run(name: str, *more: object, **variables: str) -> Any:
        return helpers.run(*words, *more, "--output-dir", tmp_path / name, fresh=True, **variables)  # type: ignore[arg-type]

    first = run("first", **online)
    assert first.returncode == 0, first.stderr
    assert "weights hf-hub:org/net: body loaded" in first.stdout
    assert [path.rpartition("/")[2] for method, path in Hub.asked if method == "GET" and "/org/" in path] == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    learned = load_file(tmp_path / "first" / "model.safetensors")
    assert torch.equal(learned["conv1.3.weight"], resnet(7).conv1[3].weight)
    assert (read_model_info(tmp_path / "first").mean, read_model_info(tmp_path / "first").image_size) == ((0.5,), 32)
    program = """
import time
from accel_train.errors import UserError
from accel_train.models import weights

print(weights.weights_file("hf-hub:org/net"))
for name in ("hf-hub:org/other", "hf-hub:a/b/c"):
    began = time.monotonic()
    try:
        weights.describe(name, False)
    except UserError as error:
        print("ERROR", time.monotonic() - began < 8, error)
"""
    line = [sys.executable, "-c", program]
    for variables, said in ((nowhere, "hf download org/other"), (online, "The hub has no model org/other")):
        env = helpers.environment(**variables)
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100)
        found, missing, wrong = done.stdout.splitlines()
        assert Path(found).name == "model.safetensors"
        assert missing.startswith("ERROR True") and said in missing, missing
        assert wrong.startswith("ERROR True model.name: Repo id must be"), wrong

    # Without the network and the cache, a new run cannot begin, and one that has begun goes on.
    shutil.rmtree(tmp_path / "hf")
    more = {"none": [], "first": ["--epochs", "2", "--allow-change", "epochs"]}
    lines = [["train", *map(str, words), *more[name], "--output-dir", str(tmp_path / name)] for name in more]
    program = "import json, sys; from accel_train.cli import main; print([main(w) for w in json.loads(sys.argv[1])])"
    env = helpers.environment(**offline)
    line = [sys.executable, "-c", program, json.dumps(lines)]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "[2, 0]", done.stderr
    assert "such as on the login node: hf download org/net" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("accel-train: error:") == 1, done.stderr
    assert not (tmp_path / "none").exists()
    predicted = helpers.python("-m", "accel_train", "predict", tmp_path / "first", helpers.write_digits(tmp_path, 1)[0])
    assert predicted.returncode == 0, predicted.stderr


def test_origins_are_compared_by_content() -> None:
    from accel_train.config.compatibility import differences
    from accel_train.config.schema import as_dict

    def config(path: str, sha256: str) -> Config:
        return Config(model=Model(weights=Path(path)), origin=Origin(weights=path, sha256=sha256))

    saved = as_dict(config("/a", "12"))
    assert differences(saved, config("/b", "12")) == {}
    assert differences(saved, config("/a", "34")) == {"model.weights": "/a (sha256 12) -> /a (sha256 34)"}
    assert differences(saved, Config()).keys() == {"model.weights"}
    assert differences(as_dict(Config()), config("/a", "12")).keys() == {"model.weights"}
    assert differences({}, Config()) == {}
