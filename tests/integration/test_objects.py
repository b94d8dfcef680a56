"""Objects of a Python program where options name code: trained, continued, on several processes, opened again."""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest

NETS = """
import os
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 8


class Net(nn.Module):
    def __init__(self, num_classes=2, width=WIDTH):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, num_classes))

    def forward(self, images):
        return self.layers(images)


def squares(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    noise = torch.randint(0, 200, (count, 1, 8, 8), generator=generator)
    return TensorDataset((noise + 50 * labels[:, None, None, None]).to(torch.uint8), labels)


def data():
    return {"train": squares(240, 0), "test": squares(60, 1)}


def losses(logits, targets):
    return nn.functional.cross_entropy(logits, targets, reduction="none")
"""
PROGRAM = f"""{NETS}
from accel_train.api import evaluate, load_run, train
from accel_train.errors import UserError


def attempt(*words, **settings):
    try:
        return train("digits", *words, **{{"epochs": 2, "batch_size": 24, "optim": {{"lr": 0.05}}, **settings}})
    except UserError as error:
        print("refused:", error)


class Killer:
    \"\"\"The loss; ends the process at its call of this number. The first calls try it.\"\"\"

    def __init__(self, call):
        self.left = call

    def __call__(self, logits, targets):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(logits, targets)

"""


def play(folder: Path, script: str, *, code: int = 0, processes: int = 1) -> str:
    """Run the program with `script` at its end in `folder`, and return what it prints."""
    (folder / "program.py").write_text(PROGRAM + script)
    done = helpers.python("program.py", cwd=folder, processes=processes)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


@pytest.mark.ci
def test_objects_train_what_their_names_train(tmp_path: Path) -> None:
    play(
        tmp_path,
        """
attempt(model=Net, data=data, loss=losses, output_dir="objects")
attempt(model=Net, data=data(), loss=lambda a, b: losses(a, b), output_dir="lambda")
""",
    )
    (tmp_path / "nets.py").write_text(NETS)
    script = "import nets\nattempt(model=nets.Net, data=nets.data, loss=nets.losses, output_dir='imported')\n"
    play(tmp_path, script)
    words = ["--model.name", "nets.py:Net", "--data.name", "nets.py:data", "--loss.name", "nets.py:losses"]
    options = ["--epochs", 2, "--batch-size", 24, "--optim.lr", 0.05, "--output-dir", "names"]
    done = helpers.python("-m", "accel_train.train", "digits", *words, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for run in ("objects", "lambda", "imported"):
        assert weights(tmp_path / run) == weights(tmp_path / "names"), run
    assert "name: nets:Net\n" in (tmp_path / "imported/config.yaml").read_text()


@pytest.mark.ci
def test_a_model_is_copied_so_that_the_same_call_trains_the_same(tmp_path: Path) -> None:
    said = play(tmp_path, """
net = Net().eval()
for tensor in net.parameters():
    tensor.requires_grad_(tensor.ndim == 2)
before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
first = attempt(model=net, data=data(), output_dir="first")
second = attempt(model=net, data=data(), output_dir="second")
assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()) and not net.training
trained = load_run(first).model.state_dict()
assert all(torch.equal(tensor, before[name]) == (tensor.ndim == 1) for name, tensor in trained.items())
assert evaluate(second).metrics["model"]["accuracy"] == first.metrics["test_accuracy"]
again = attempt(model=net, data=data(), output_dir="first")
assert again.nothing_left and again.metrics['test_loss'] == first.metrics['test_loss']
attempt(model=Net(width=9), data=data(), output_dir="first")
attempt(model=net, data={**data(), "train": squares(240, 5)}, output_dir="first")
""")  # fmt: skip
    assert weights(tmp_path / "first") == weights(tmp_path / "second")
    refused = [line for line in said.splitlines() if line.startswith("refused:")]
    assert len(refused) == 2
    assert "model.name: <object>:Net#" in refused[0] and "data.name: <object>:TensorDataset#" in refused[1]


@pytest.mark.slow
def test_a_killed_run_goes_on_by_the_same_call_and_no_other(tmp_path: Path) -> None:
    call = """
torch.manual_seed(3)
attempt(model=Net(), data=data(), loss=Killer({}), checkpoint={{"every_updates": 3}}, output_dir="{}")
"""
    play(tmp_path, call.format(0, "whole"))
    play(tmp_path, call.format(12, "run"), code=-9)
    for other in ("Net(width=9)", "nn.Sequential(nn.Flatten(), nn.Linear(64, 2))"):
        said = play(tmp_path, call.format(0, "run").replace("Net()", other))
        assert "refused: The checkpoint was made with other settings: model.name: <object>:Net#" in said, said
    said = play(tmp_path, call.format(0, "run").replace("data()", '{"train": squares(239, 0), "test": squares(60, 1)}'))
    assert "refused: The checkpoint was made with other settings: data.name: <object>:TensorDataset#" in said
    play(tmp_path, call.format(9, "run"), code=-9)
    said = play(tmp_path, call.format(0, "run"))
    assert "continuing after update" in said and "in 3 starts" in said
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    # The command line has no objects.
    done = helpers.python("-m", "accel_train.train", "run/config.yaml", "--output-dir", "run", cwd=tmp_path)
    assert done.returncode == 2 and "made with an object of a Python program (Net#" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", ["launcher", "fork"])
def test_on_two_processes(tmp_path: Path, start: str) -> None:
    script = 'torch.manual_seed(3)\nattempt("--bitwise", model=Net(), data=data(), loss=losses, output_dir="{}")\n'
    play(tmp_path, script.format("one"))
    if start == "launcher":
        play(tmp_path, script.format("two"), processes=2)
    else:
        play(tmp_path, f"""
from accelerate import notebook_launcher
torch.manual_seed(3)
net = Net()
notebook_launcher(
    lambda: attempt("--bitwise", model=net, data=data(), loss=lambda a, b: losses(a, b), output_dir="two"),
    num_processes=2,
    use_port="{helpers.free_port()}",
)
""")  # fmt: skip
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
    assert json.loads((tmp_path / "two/result.json").read_text())["world_size"] == 2


def test_processes_that_made_other_weights_are_refused(tmp_path: Path) -> None:
    script = 'torch.manual_seed(int(os.environ["RANK"]))\nattempt(model=Net(), data=data(), output_dir="run")\n'
    said = play(tmp_path, script, processes=2)
    assert "refused: The processes do not agree: the weights of the model (give a function that makes it) is" in said


LOAD = """
def load(**settings):
    try:
        print("loaded", sorted(load_run("run", **settings).model.state_dict()))
    except UserError as error:
        print("refused:", error)

"""


@pytest.mark.ci
def test_a_run_is_opened_with_the_object_and_says_that_it_needs_it(tmp_path: Path) -> None:
    script = 'attempt(model=Net(), data=data, output_dir="run")\nload()\nload(trust_code=True)\n'
    script += "load(model=Net)\nload(model=Net())\nload(model=Net(width=9))\n"
    script += "print(evaluate('run', model=Net, data=data).metrics['model']['count'])\n"
    said = play(tmp_path, LOAD + script).splitlines()
    lines = [line for line in said if line.startswith(("refused", "loaded"))]
    for line in lines[:2]:
        assert "--model.name: the run was made with an object of a Python program (Net#" in line
    assert lines[2:4] == ["loaded ['layers.1.bias', 'layers.1.weight', 'layers.3.bias', 'layers.3.weight']"] * 2
    assert "is of another model: layers.1.bias is (8,) there and (9,) in this model" in lines[4]
    assert "60" in said
    done = helpers.python("-m", "accel_train", "evaluate", "run", cwd=tmp_path)
    assert done.returncode == 2 and "the argument model=…" in done.stderr


@pytest.mark.ci
def test_what_cannot_be_trained_is_one_line(tmp_path: Path) -> None:
    said = play(tmp_path, """
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

class Stream(IterableDataset):
    def __iter__(self): yield from ()

class Own(Dataset):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, number): return self.inner[number]

net, train_set = Net(), squares(60, 0)
far = TensorDataset(train_set.tensors[0], torch.arange(60) + 10**9)
attempt(model=net, data={"train": Stream()})
attempt(model=net, data={"train": DataLoader(train_set)})
attempt(model=net, data=train_set)
attempt(model=net, data={"test": train_set})
attempt(model=net, data={"trian": train_set})
attempt(model=net, data={"train": far})
attempt(model=net, data={"name": {"train": Own(train_set)}, "workers": 1})
attempt(model=Net(3), data={"train": train_set})
attempt(model=[net], data={"train": train_set})
attempt(model=net, data={"train": train_set}, loss=nn.CrossEntropyLoss())
attempt(seed=net)
attempt(epoch=3)
attempt(optim={"lrate": 3})
own = Own(train_set)
attempt(model=None, data={"train": own, "val": Subset(own, range(9)), "test": None}, output_dir="run")
""")  # fmt: skip
    expected = [
        "train is of type Stream, without a length or items by number; expected a map-style Dataset",
        "train is a DataLoader; expected its Dataset (loader.dataset)",
        'found a value of type TensorDataset; expected a dict {"train": Dataset, …}',
        "found no split 'train', only test",
        "found a split 'trian'; expected train, val or test. Did you mean 'train'?",
        "the largest label is 1000000059, more than there are samples",
        "cannot be sent to data workers (TypeError: it is defined in the program itself). Import its class",
        "computed [1, 3] from an image [1, 1, 8, 8]; expected logits of the 2 classes",
        "--model.name: found an object of type list; expected a function or a class",
        'leave out the mean, as with reduction="none"',
        "seed: found an object of type Net; expected words, numbers and lists",
        "--epoch: unknown option (a keyword). Did you mean 'epochs'?",
        "--optim.lrate: unknown option (a keyword). Did you mean 'optim.lr'?",
    ]
    refused = [line for line in said.splitlines() if line.startswith("refused:")]
    assert len(refused) == len(expected), said
    for line, part in zip(refused, expected, strict=True):
        assert part in line
    # Without workers, and with the recipe's model.
    assert "warning: loading images in this process, without workers." in said
    assert "60 training, 9 validation images of 2 classes" in said
    assert (tmp_path / "run/model.safetensors").is_file()
