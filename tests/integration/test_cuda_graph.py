"""`--cuda-graph true` on a pretended device, whose replays run no Python: a number stays as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import ROOT, free_port, python, run
from pretend_cuda import Done, Pretended
from safetensors.torch import load_file
from test_pretended_gpu import READ_LATER, exploding, pytestmark, succeeded

__all__ = ["pytestmark"]

# BatchNorm over two virtual batches, dropout, mixup, two micro-batches; an epoch is 4 updates and a padded one.
NET = """
digits --model.name test_resnet --model.image-size 32 --model.dropout 0.3 --model.drop-path 0.2 --data.name synthetic
--data.channels 3 --data.image-size 32 --data.train-images 72 --data.test-images 8 --augment.crop random --augment.pad 2
--augment.mixup 0.2 --epochs 2 --batch-size 16 --micro-batch-size 8 --virtual-batch-size 4 --optim.clip 1
--ema.enabled true --log-every-updates 5
""".split()  # noqa: SIM905
# Learning rates that float32 represents: 0, 1/32, 2/32, … 1/8.
EXACT = "--schedule.name constant --schedule.warmup-epochs 0.8 --optim.lr 0.125".split()  # noqa: SIM905
COSINE = "--schedule.name cosine --schedule.warmup-epochs 0.4 --optim.lr 0.1 --ema.warmup true".split()  # noqa: SIM905

SHORT = """
--batch-size 16 --epochs 1 --data.train-limit 104 --data.test-limit 8 --schedule.name constant
--schedule.warmup-epochs 0 --optim.lr 0.125
""".split()  # noqa: SIM905
RECIPES = {
    "mnist_cnn": ("--data.channels", 1, "--data.image-size", 28),
    "cifar10_fast": ("--data.channels", 3, "--data.image-size", 32),
    "digits": (),
}


@pytest.fixture(scope="module")
def gpu() -> Iterator[Pretended]:
    pretended = Pretended()
    yield pretended
    pretended.end()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {name: load_file(directory / f"{name}.safetensors") for name in ("model", "ema")}
    return {f"{name}/{key}": value for name, each in tensors.items() for key, value in each.items()}


RECORDING = """
import pytest, torch, pretend_cuda as pretended
pretended.install()
with pretended.PretendedCuda():
    number, sum_ = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    graph, factor = torch.cuda.CUDAGraph(), 3.0
    with torch.cuda.graph(graph):
        product = number * factor
        sum_.add_(product)
    assert sum_.item() == 0 and product.item() != 3  # nothing was computed
    factor = 5.0
    for value in (1.0, 2.0):
        number.fill_(value)
        graph.replay()
    assert product.item() == 6 and sum_.item() == 9
    for wrong in (number.item, lambda: torch.ones(2).to("cuda"), lambda: number.to("cpu", non_blocking=True),
                  torch.cuda.synchronize, lambda: number.copy_(torch.ones(()))):
        with pytest.raises(RuntimeError, match="when stream is capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wrong()
"""


def test_the_pretended_device_replays_what_was_recorded_and_refuses_to_wait_meanwhile() -> None:
    done = python("-c", RECORDING, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("momentum", "no"), ("momentum", "bf16"), ("adamw", "no")],
)
def test_a_recorded_run_has_the_bits_of_one_that_is_not(
    gpu: Pretended, tmp_path: Path, optimizer: str, precision: str
) -> None:
    words = ("train", *NET, *EXACT, "--optim.name", optimizer)
    plain = succeeded(gpu(*words, "--output-dir", tmp_path / "plain", precision=precision))
    done = succeeded(gpu(*words, "--cuda-graph", "true", "--output-dir", tmp_path / "graph", precision=precision))
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "graph")
    assert [key for key, values in one.items() if not torch.equal(values, other[key])] == []
    assert done.waits[6:9] == [READ_LATER] * 3
    for kernels in done.kernels[6:9]:
        assert kernels["cuda_graph.py:__call__"] == 3  # two micro-batches, and the optimizer
        masks = sum(times for line, times in kernels.items() if line.startswith(("keyed.py", "keys.py", "together.py")))
        assert sum(kernels.values()) - masks <= 30 and sum(plain.kernels[6].values()) > 900


DRAWING = """
import torch, torch.nn.functional as F
from torch import nn
class Net(nn.Module):  # dropout as a function, and random numbers of torch's generator
    def __init__(self, classes, channels, size):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * size * size, classes)
    def forward(self, images):
        values = F.dropout(F.relu(self.norm(self.conv(images))), 0.3, self.training).flatten(1)
        return self.last(values * (1 + 0.1 * torch.randn_like(values)) if self.training else values)
def net(num_classes, in_chans, image_size):
    return Net(num_classes, in_chans, image_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("net", "most"), [("mnist_cnn", 41), ("cifar10_fast", 15), ("digits", 43)])
def test_nets_of_recipes_and_of_users(gpu: Pretended, tmp_path: Path, net: str, most: int) -> None:
    (tmp_path / "mine.py").write_text(DRAWING)
    own = ("--model.name", f"{tmp_path}/mine.py:net") if net == "digits" else ("--data.name", "synthetic")
    words = ("train", net, *own, "--data.train-images", 104, *SHORT, *RECIPES[net])
    succeeded(gpu(*words, "--output-dir", tmp_path / "plain"))
    done = succeeded(gpu(*words, "--cuda-graph", "true", "--output-dir", tmp_path / "graph"))
    assert [sum(kernels.values()) <= most for kernels in done.kernels[3:6]] == [True] * 3, done.kernels[4]
    one, other = (load_file(tmp_path / place / "model.safetensors") for place in ("plain", "graph"))
    for key, values in one.items():  # Adadelta, of mnist_cnn, has another kernel for a learning rate in a tensor
        torch.testing.assert_close(values, other[key], rtol=0, atol=1e-6 if net == "mnist_cnn" else 0)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param("momentum", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("adam", "adadelta")),
    ],
)
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(
    gpu: Pretended, tmp_path: Path, optimizer: str
) -> None:
    """A new start records later, so other updates are recorded: their kernels are the same."""
    words = ("train", *NET, *COSINE, "--optim.name", optimizer, "--cuda-graph", "true", "--checkpoint.every-updates", 7)
    succeeded(gpu(*words, "--output-dir", tmp_path / "whole"))
    for name in ("manifest.json", "state.json"):
        assert (tmp_path / "whole" / "checkpoints" / "update-00000007" / name).exists()
    begun = tmp_path / "whole" / "checkpoints" / "update-00000007"
    succeeded(gpu(*words, "--resume", begun, "--output-dir", tmp_path / "parts"))
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert [key for key, values in one.items() if not torch.equal(values, other[key])] == []
    # Learning rates were rounded to float32.
    succeeded(gpu(*words, "--cuda-graph", "false", "--output-dir", tmp_path / "plain"))
    for key, values in weights(tmp_path / "plain").items():
        torch.testing.assert_close(values, one[key], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_an_update_that_is_not_finite(gpu: Pretended, tmp_path: Path, policy: str) -> None:
    words = ["train", exploding(tmp_path, "adamw"), "--ema.enabled", "true", "--on-nonfinite", policy]
    words += ["--epochs", 2, "--cuda-graph", "true", "--checkpoint.every-updates", 2]
    done = gpu(*words, "--output-dir", tmp_path / "run")
    if policy == "stop":
        assert done.code == 2 and "is not finite: the loss of 8 of 8 samples (ids" in done.output, done.output
        return
    succeeded(done)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["left_out_updates"] == 2
    assert all(values.isfinite().all() for values in weights(tmp_path / "run").values())
    succeeded(gpu(*words, "--cuda-graph", "false", "--on-nonfinite", "skip", "--output-dir", tmp_path / "plain"))
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "run")
    assert [key for key, values in one.items() if not torch.equal(values, other[key])] == []


READING = """
from torch import nn
class Net(nn.Module):
    def __init__(self, classes, pixels):
        super().__init__()
        self.layer = nn.Linear(pixels, classes)
    def forward(self, images):
        return self.layer(images.flatten(1)) * (2 if images.mean().item() > 0 else 1)
def net(num_classes, in_chans, image_size):
    return Net(num_classes, in_chans * image_size**2)
"""


@pytest.mark.slow
def test_what_cannot_be_recorded_is_refused_in_one_line(gpu: Pretended, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(READING)
    small = "--epochs 1 --batch-size 16 --data.train-limit 96 --data.test-limit 24 --cuda-graph true".split()  # noqa: SIM905
    cases = {
        "the loss scaler": ((), {"precision": "fp16"}),
        "the exact sums": (("--bitwise", "true"), {}),
        "the optimizer lamb": (("--optim.name", "lamb"), {}),
        "graphs keep memory": (("--micro-batch-size", "auto"), {}),
        "recomputation": (("--model.name", "test_vit", "--model.gradient-checkpointing", "true"), {}),
        "torch.compile": ((), {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        "the update cannot be recorded (operation not": (("--model.name", f"{tmp_path}/mine.py:net"), {}),
    }
    for number, (said, (words, variables)) in enumerate(cases.items()):
        done = gpu("train", "digits", *small, *words, "--output-dir", tmp_path / str(number), **variables)
        (line,) = [line for line in done.output.splitlines() if "error" in line]
        assert done.code == 2 and f"--cuda-graph: {said}" in line, done.output
        assert "Traceback" not in done.output
    done = run("digits", *small, "--output-dir", tmp_path / "cpu")
    assert done.returncode == 2 and "--cuda-graph: this run is on cpu" in done.stderr, done.stderr


def recorded(*words: object, processes: int = 2, code: int = 0) -> str:
    """Train on CPUs that record; returns what was printed."""
    done = python(ROOT / "tests" / "graph_worker.py", *words, processes=processes)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_sum_as_ddp_does(tmp_path: Path, processes: int) -> None:
    """Three share four virtual batches: two of them have empty passes, which only DDP makes."""
    words = (*NET, *EXACT, "--optim.name", "momentum", "--micro-batch-size", 4, "--epochs", 4 - processes)
    for value in ("true", "false"):
        recorded(*words, "--cuda-graph", value, "--output-dir", tmp_path / value, processes=processes)
    one, other = weights(tmp_path / "true"), weights(tmp_path / "false")
    for key, values in one.items():  # gloo adds three numbers in an order that depends on their place
        torch.testing.assert_close(values, other[key], rtol=0, atol=0 if processes == 2 else 1e-4)


@pytest.mark.slow
def test_several_processes_go_on(tmp_path: Path) -> None:
    words = (*NET, *EXACT, "--cuda-graph", "true", "--checkpoint.every-updates", 7)
    recorded(*words, "--output-dir", tmp_path / "whole")
    begun = tmp_path / "whole" / "checkpoints" / "update-00000007"
    for processes in (2, 3):
        recorded(*words, "--resume", begun, "--output-dir", tmp_path / f"on-{processes}", processes=processes)
        one, other = weights(tmp_path / "whole"), weights(tmp_path / f"on-{processes}")
        for key, values in one.items():
            torch.testing.assert_close(values, other[key], rtol=0, atol=0 if processes == 2 else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_several_processes_leave_an_update_out(tmp_path: Path, policy: str) -> None:
    words = [exploding(tmp_path, "adamw"), "--ema.enabled", "true", "--epochs", 2, "--checkpoint.every-updates", 2]
    words += ["--virtual-batch-size", 4]
    recorded(*words, "--cuda-graph", "true", "--on-nonfinite", policy, "--output-dir", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["left_out_updates"] == 2
    recorded(*words, "--cuda-graph", "false", "--on-nonfinite", "skip", "--output-dir", tmp_path / "plain")
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "run")
    for key, values in one.items():  # Adam's fused kernel on CPUs has another rounding for a learning rate in a tensor
        torch.testing.assert_close(values, other[key], rtol=0, atol=1e-6)


LEAVING_OUT = """
from torch import nn
class Net(nn.Module):
    def __init__(self, classes, pixels):
        super().__init__()
        self.layer, self.unused = nn.Linear(pixels, classes), nn.Linear(1, 1)
    def forward(self, images):
        return self.layer(images.flatten(1))
def net(num_classes, in_chans, image_size):
    return Net(num_classes, in_chans * image_size**2)
"""


@pytest.mark.ci
def test_a_model_that_leaves_out_parameters_needs_one_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LEAVING_OUT)
    words = ("digits", *SHORT, "--model.name", f"{tmp_path}/mine.py:net", "--cuda-graph", "true")
    recorded(*words, "--output-dir", tmp_path / "one", processes=1)
    output = recorded(*words, "--output-dir", tmp_path / "two", code=2)
    (line,) = [line for line in output.splitlines() if "--cuda-graph:" in line]
    assert "this model may leave out parameters" in line and "Traceback" not in output


@pytest.mark.slow
def test_no_process_waits_for_its_device_but_where_gradients_are_summed(tmp_path: Path) -> None:
    both, port = [Pretended(), Pretended()], free_port()
    words = ("train", *NET, *EXACT, "--micro-batch-size", 4, "--cuda-graph", "true", "--share-gpus", "true")

    def start(rank: int) -> Done:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return both[rank](*words, "--output-dir", tmp_path / "run", RANK=str(rank), LOCAL_RANK=str(rank), **world)

    with ThreadPoolExecutor() as threads:
        for done in threads.map(start, range(2)):
            succeeded(done)
            assert done.waits[6:9] == [READ_LATER] * 3
            for kernels in done.kernels[6:9]:
                assert kernels["cuda_graph.py:__call__"] == 3 and kernels["cuda_graph.py:sum_gradients"] == 1
    for each in both:
        each.end()
