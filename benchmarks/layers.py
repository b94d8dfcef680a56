"""The kernels and the time of the layers that make a run the same everywhere, beside torch's own.

    python benchmarks/layers.py [--threads 1] [--device cpu] [--turns 40]

First the kernels that an update of some nets starts (transform, forward, backward, optimizer), counted on the pretended
device of the tests: that needs no GPU. Their number depends on that of the virtual batches, not on the samples of each,
so the batches are small. Then the time, forward and backward, of dropout layers of some sizes, and of the 20 BatchNorms
of cifar10_resnet18 for a batch of 256 over virtual batches; for these also what the difference is of a whole update of
the plain model. Times are medians; a ratio is the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_train import models
from accel_train.config.options import parse
from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import DropoutKeys, convert_dropout

DROPOUT = (((64, 9216), 0.25), ((64, 128), 0.5), ((256, 9216), 0.25), ((256, 128), 0.5), ((64, 197, 384), 0.1))
BATCH = 256
VIRTUAL_BATCHES = 64, 32, 16

ROOT = Path(__file__).parent.parent
CIFAR = "--data.name synthetic --data.channels 3 --data.image-size 32 --model.image-size 32"
KERNELS = {
    "ResNet-18, 512/32": f"cifar10_resnet18 {CIFAR} --model.name resnet18 --batch-size 32 --virtual-batch-size 2",
    "ResNet-50, 256/32": f"cifar10_resnet18 {CIFAR} --model.name resnet50 --batch-size 16 --virtual-batch-size 2",
    "cifar10_fast, 512/32": f"cifar10_fast {CIFAR} --batch-size 32 --virtual-batch-size 2",
    "mnist_cnn, 64": "mnist_cnn --data.name synthetic --data.channels 1 --data.image-size 28",
}
"""Net, batch / virtual batch -> options with as many virtual batches."""
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
    for name, words in KERNELS.items():
        command = [sys.executable, "-c", COUNT, *words.split(), "--data.train-images", "256"]
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

        runs = {"torch": lambda p=p, call=call: call(nn.Dropout(p)), "keyed": call_keyed}  # type: ignore[misc]
        medians = [statistics.median(times) for times in in_turns(runs, device, turns).values()]
        print(f"{'x'.join(map(str, shape)):>16} {p:>5} {medians[0]:8.3f} {medians[1]:8.3f}")


def time_batchnorm(device: torch.device, turns: int) -> None:
    config = parse(["cifar10_resnet18"])
    model = models.create_model(config.model, num_classes=10, channels=3, image_size=32).to(device)
    images = torch.randn(BATCH, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    inputs: list[tuple[nn.Module, Tensor]] = []
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    hooks = [norm.register_forward_hook(lambda m, given, _: inputs.append((m, given[0].detach()))) for norm in norms]
    model(images)
    for hook in hooks:
        hook.remove()
    gradients = [torch.randn_like(values) for _, values in inputs]
    values = [values.requires_grad_() for _, values in inputs]
    plain = nn.ModuleList(copy.deepcopy(norm) for norm, _ in inputs)

    def call(layers: nn.ModuleList, batches: VirtualBatches | None = None) -> None:
        if batches is not None:
            batches.begin(real, padded=False)
        for layer, given, gradient in zip(layers, values, gradients, strict=True):
            given.grad = None
            layer(given).backward(gradient)
        if batches is not None:
            batches.end_update()

    real = torch.ones(BATCH, device=device)
    runs: dict[str, Callable[[], None]] = {
        "update": lambda: model(images).sum().backward(),
        "plain": lambda: call(plain),
    }
    for size in VIRTUAL_BATCHES:
        layers = copy.deepcopy(plain)
        batches = VirtualBatches(layers, size)
        runs[str(size)] = lambda layers=layers, batches=batches: call(layers, batches)  # type: ignore[misc]
    times = in_turns(runs, device, turns)
    plain_ms = statistics.median(times["plain"])
    print(f"{len(norms)} BatchNorms of cifar10_resnet18, batch {BATCH}: plain {plain_ms:.1f} ms")
    print(f"forward and backward of the whole plain model: {statistics.median(times['update']):.1f} ms")
    for size in map(str, VIRTUAL_BATCHES):
        turns_of = list(zip(times[size], times["plain"], times["update"], strict=True))
        ratio = statistics.median(own / other for own, other, _ in turns_of)
        more = statistics.median((own - other) / update for own, other, update in turns_of)
        print(f"virtual batches of {size}: {ratio:.2f} of plain, {more:+.1%} of an update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    count_kernels()
    time_dropout(torch.device(options.device), options.turns)
    time_batchnorm(torch.device(options.device), options.turns)


if __name__ == "__main__":
    main()
