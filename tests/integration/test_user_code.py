"""A user's own model, data set and loss in a folder of their own: trained, killed, resumed, evaluated, given away."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import helpers
import pytest
from test_restart import assert_bitwise_equal, killed_and_restarted

CODE = """
import torch
from torch import nn
from torchvision.transforms import v2

import beside

def net(num_classes, in_chans, width=8):
    return nn.Sequential(
        nn.Conv2d(in_chans, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(width, num_classes),
    )

class Squares(torch.utils.data.Dataset):
    '''Dark and light squares. It augments them with torch's global generator.'''
    classes = ["dark", "light"]
    augment = v2.RandomErasing(p=0.5)

    def __init__(self, count, first, training):
        self.count, self.first, self.training = count, first, training
        if training:
            self.targets = [label(i) for i in range(count)]

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.first + i)
        image = torch.randint(0, 180, (3, 12, 12), generator=generator, dtype=torch.uint8) + 75 * label(i)
        return self.augment(image) if self.training else image, label(i)

def label(i):
    return i % 2

def data():
    return {"train": Squares(88, 0, True), "val": Squares(24, 1000, False), "test": Squares(24, 2000, False)}

def loss(logits, targets):
    return beside.twice(nn.functional.cross_entropy(logits, targets, reduction="none"))
"""
RECIPE = """
batch_size: 16
virtual_batch_size: 4
data: {name: "code/mine.py:data"}
augment: {flip: 0.5, mixup: 0.2}
model: {name: "code/mine.py:net", kwargs: {width: 12}}
loss: {name: "code/mine.py:loss"}
optim: {name: adamw, lr: 1e-2}
ema: {enabled: true, decay: 0.9}
log_every_updates: 1
checkpoint: {every_updates: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe in a folder with a file that it names, and one that this file imports."""
    (tmp_path / "own/code").mkdir(parents=True)
    (tmp_path / "own/code/mine.py").write_text(CODE)
    (tmp_path / "own/code/beside.py").write_text("def twice(losses):\n    return 2 * losses\n")
    path = tmp_path / "own/recipe.yaml"
    path.write_text(RECIPE)
    return path


def program(*words: object) -> subprocess.CompletedProcess[str]:
    return helpers.python("-m", "accel_train", *words)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_is_resumed_bitwise_on_other_processes_after_kills(recipe: Path, tmp_path: Path) -> None:
    words = (recipe, "--epochs", 6, "--bitwise", "true")
    whole, run = tmp_path / "whole", tmp_path / "run"
    done = helpers.run(*words, "--data.workers", 0, "--output-dir", whole, fresh=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reading the labels of 24 test samples at each start: mine.py:data gives no `targets`" in done.stderr
    assert "mine.py:net for 12x12 pixels" in done.stdout
    words = (*words, "--data.workers", 1)
    killed_and_restarted(run, *words, processes=(2, 1), kills=2, seed=1)
    assert_bitwise_equal(run, whole)
    assert json.loads((run / "result.json").read_text())["test_accuracy"] > 0.9


@pytest.mark.ci
def test_a_run_s_code_runs_only_when_the_user_says_so(recipe: Path, tmp_path: Path) -> None:
    run, code = tmp_path / "run", tmp_path / "own/code/mine.py"
    assert helpers.run(recipe, "--epochs", 1, "--output-dir", run).returncode == 0
    kept = json.loads((run / "code.json").read_text())
    assert set(kept) == {"model.name", "data.name", "loss.name"}
    assert (run / kept["model.name"]["kept"]).read_text() == CODE
    imports = kept["model.name"]["imports"]
    assert set(imports) == {"beside", "torch", "torchvision"}
    assert imports["beside"].startswith("sha256 ")
    images = helpers.write_digits(tmp_path / "images")

    for words in (("evaluate", run), ("predict", run, *images)):
        refused = program(*words)
        assert refused.returncode == 2
        assert refused.stderr.count("\n") == 1
        line = " ".join(str(word) for word in ("accel-train", *words, "--trust-code", "true"))
        assert f"its text is {run}/code/mine-" in refused.stderr and refused.stderr.endswith(f"that: {line}\n")

    # The user's own file may have changed: the text that the run keeps is used, also where the run has moved to.
    marker = tmp_path / "was-run"
    code.write_text(f"open({str(marker)!r}, 'w').close()\n" + CODE)
    done = program("evaluate", run, "--trust-code", "true")
    assert done.returncode == 0, done.stderr
    assert "-" in done.stdout and ":data test, 24 images" in done.stdout
    run = run.rename(tmp_path / "moved")
    done = program("predict", run, *images, "--trust-code", "true")
    assert done.stdout.count("%") == len(images)
    shutil.rmtree(tmp_path / "own")
    done = program("predict", run, *images, "--trust-code", "true")
    assert done.returncode == 2  # what it imports was not kept
    assert "ModuleNotFoundError: No module named 'beside'" in done.stderr
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "processes", "message"),
    [
        (("generator = torch", "if i == 5: raise ValueError('no image 5')\n        generator = torch"), 2,
         "train sample 5 cannot be read: ValueError: no image 5 (mine.py, line "),
        (("training else image, label(i)", "training else image, 1 - label(i)"), 1, "train sample "),
        (("return i % 2", "return i % 3"), 2, "labels outside its 2 classes (0 to 1): the first is 2, of train"),
        (("nn.Linear(width, num_classes)", "nn.Linear(width + 1, num_classes)"), 2, "RuntimeError: "),
        (('reduction="none")', 'reduction="mean")'), 2, "returned float32 [] for the logits of 4 samples"),
    ],
)  # fmt: skip
def test_mistakes_in_the_code_are_one_line_on_one_process(
    recipe: Path, tmp_path: Path, change: tuple[str, str], processes: int, message: str
) -> None:
    assert change[0] in CODE
    (tmp_path / "own/code/mine.py").write_text(
        CODE.replace(*change).replace("if training:", f"if {'else' in change[0]}:")
    )
    done = helpers.run(recipe, "--epochs", 1, "--data.workers", processes - 1, "--output-dir", tmp_path / "run",
                       processes=processes)  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("reading the labels")]
    assert len(errors) == 1, done.stderr
    assert message in errors[0]
    assert "mine.py:" in errors[0]


def test_processes_with_other_code_do_not_train_together(recipe: Path, tmp_path: Path) -> None:
    """On a cluster whose nodes have copies of the code, one of them may be older."""
    script = tmp_path / "each_its_own.py"
    script.write_text(
        f"import os, sys\nfrom accel_train.cli import main\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\nsys.exit(main(sys.argv[1:]))\n"
    )
    for rank in "01":
        shutil.copytree(tmp_path / "own", tmp_path / rank)
    with (tmp_path / "1/code/mine.py").open("a") as file:
        file.write("# newer\n")
    done = helpers.python(script, "train", "./recipe.yaml", "--output-dir", tmp_path / "run", processes=2)
    assert done.returncode == 2
    assert "The processes do not agree: code is " in done.stderr
    assert done.stderr.count("accel-train: error") == 1


def test_own_code_as_a_module_of_the_working_folder(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "own/code").rename(tmp_path / "own/my_package")
    words = ("train", "digits", "--model.name", "my_package.mine:net", "--epochs", "1")
    sibling = tmp_path / "own/my_package/mine.py"
    sibling.write_text(CODE.replace("import beside", "from my_package import beside"))
    done = helpers.python("-m", "accel_train", *words, "--output-dir", tmp_path / "run", cwd=tmp_path / "own")
    assert done.returncode == 0, done.stderr
    assert "my_package.mine:net for 8x8 pixels" in done.stdout
