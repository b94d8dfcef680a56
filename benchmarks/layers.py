"""The kernels and the time of the layers that make a run the same everywhere, beside torch's own.

    python benchmarks/layers.py [--threads 1] [--device cpu] [--turns 20]

First the kernels that an update of some nets starts (transform, forward, backward, optimizer), counted on the pretended
device of the tests: that needs no GPU. Their number depends on that of the virtual batches, not on the samples of each,
so the batches are small. Triton is not there: BatchNorm has the kernels of torch's operators. Then the time, forward
and backward, of dropout layers of some sizes, and of whole updates of these nets on this machine. Times are medians; a
ratio is the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import same_run
import torch
from torch import Tensor, nn

from accel_train.models.dropout import DropoutKeys, convert_dropout

DROPOUT = (((64, 9216), 0.25), ((64, 128), 0.5), ((256, 9216), 0.25), ((256, 128), 0.5), ((64, 197, 384), 0.1))
ROOT = Path(__file__).parent.parent
CIFAR = "--data.name synthetic --data.channels 3 --model.image-size 32"
NETS = {  # options, batch, virtual batch
    "ResNet-18": (f"cifar10_resnet18 {CIFAR} --model.name resnet18", 512, 32),
    "ResNet-50": (f"cifar10_resnet18 {CIFAR} --model.name resnet50", 256, 32),
    "cifar10_fast": (f"cifar10_fast {CIFAR}", 512, 32),
    "mnist_cnn": ("mnist_cnn --data.name synthetic --data.channels 1 --model.image-size 28", 64, None),
}
CPU_BATCH = 64
COUNT = """
import sys, pretend_cuda as pretended
pretended.install()
import same_run
with pretended.PretendedCuda():
    setup = same_run.create_setup(sys.argv[1:])
    source = same_run.batches(setup)
    for kind in ("same run", "plain"):
        for _ in range(3):
            pretended.kernels.clear()
            same_run.update(setup, source, kind)
        print(sum(pretended.kernels.values()))
"""


def count_kernels() -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)
    print(f"{'kernels an update':>20} {'torch':>6} {'ours':>6} {'ratio':>6}")
    for name, (words, batch, virtual_batch) in NETS.items():
        # As many virtual batches, but of two images.
        shape = f"--batch-size {2 * batch // virtual_batch} --virtual-batch-size 2" if virtual_batch else ""
        name = f"{name}, {batch}" + f"/{virtual_batch}" * (virtual_batch is not None)
        command = [sys.executable, "-c", COUNT, *words.split(), *shape.split(), "--data.train-limit", "256"]
        output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        ours, plain = map(int, output.split()[-2:])
        print(f"{name:>20} {plain:>6} {ours:>6} {ours / plain:>6.2f}", flush=True)


def in_turns(runs: Mapping[str, Callable[[], None]], device: torch.device, turns: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other in each turn; the first three turns warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 3):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append((time.perf_counter() - began) * 1000)
    return times


def time_dropout(device: torch.device, turns: int) -> None:
    print(f"{'dropout':>16} {'p':>5} {'torch':>8} {'keyed':>8} ms")
    for shape, p in DROPOUT:
        keyed = nn.Sequential(nn.Dropout(p))
        keys = convert_dropout(keyed, 0)
        values = torch.randn(shape, device=device, requires_grad=True)
        gradient, ids = torch.randn_like(values), torch.arange(shape[0])

        def call(layer: nn.Module, values: Tensor = values, gradient: Tensor = gradient) -> None:
            values.grad = None
            layer(values).backward(gradient)

        def call_keyed(layer: nn.Module = keyed, keys: DropoutKeys = keys, call: Any = call, ids: Tensor = ids) -> None:
            keys.set_samples(ids, 0, device)
            call(layer)

        runs: dict[str, Any] = {"torch": lambda p=p, call=call: call(nn.Dropout(p)), "keyed": call_keyed}
        medians = [statistics.median(times) for times in in_turns(runs, device, turns).values()]
        print(f"{'x'.join(map(str, shape)):>16} {p:>5} {medians[0]:8.3f} {medians[1]:8.3f}")


def time_nets(turns: int) -> None:
    """Whole updates on this machine's device, with one batch size on CPUs, where the others take long."""
    print(f"{'an update':>24} {'torch':>8} {'ours':>8} ms {'ratio':>5}")
    for name, (words, batch, virtual_batch) in NETS.items():
        batch = batch if torch.cuda.is_available() else CPU_BATCH
        shape = f"--batch-size {batch} --data.train-limit {2 * batch}"
        shape += f" --virtual-batch-size {virtual_batch}" * (virtual_batch is not None)
        setup = same_run.create_setup([*words.split(), *shape.split()])
        source = same_run.batches(setup)
        runs = {kind: partial(same_run.update, setup, source, kind) for kind in ("plain", "same run")}
        plain, ours = in_turns(runs, setup.device, turns).values()
        ratio = statistics.median(own / other for own, other in zip(ours, plain, strict=True))
        label = f"{name}, {batch}" + f"/{virtual_batch}" * (virtual_batch is not None)
        print(f"{label:>24} {statistics.median(plain):8.1f} {statistics.median(ours):8.1f}    {ratio:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default="cpu", help="of the dropout layers (default: cpu)")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    count_kernels()
    torch.set_num_threads(options.threads)
    time_dropout(torch.device(options.device), options.turns)
    time_nets(options.turns)


if __name__ == "__main__":
    main()
