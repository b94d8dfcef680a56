"""Sums the gradients of the same virtual batches, divided among processes: `… exact_gradients_worker.py FOLDER`.

FOLDER/RANK.json of each process, under any launcher: case -> what tells the bits of each parameter's sum.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from accel_train.exact_sum import ExactGradients, exact_sum
from accel_train.launch.accelerator import create_accelerator
from accel_train.launch.environment import prepare_environment

VIRTUAL_BATCHES, SAMPLES = 8, 6


def digest(values: Tensor | None) -> str:
    if values is None or values.isnan().all():
        return "None" if values is None else "NaN"
    return hashlib.sha256(values.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def shares(processes: int) -> dict[str, list[list[int]]]:
    """Which process has which virtual batches, in which order."""
    numbers = list(range(VIRTUAL_BATCHES))
    each = VIRTUAL_BATCHES // processes
    consecutive = [numbers[rank * each : (rank + 1) * each] for rank in range(processes)]
    return {
        "consecutive": consecutive,
        "backwards": [share[::-1] for share in consecutive[::-1]],
        "in turn": [numbers[rank::processes] for rank in range(processes)],
        "all at the last": [[] for _ in range(processes - 1)] + [numbers],
    }


@functools.cache
def gradients(number: int) -> list[Tensor | None]:
    """Of virtual batch `number`: of several sizes and layouts, one larger than a bucket, one missing in most."""
    numbers = torch.Generator().manual_seed(number)
    large = torch.randn(1100, 1000, generator=numbers) * torch.exp2(-30 * torch.rand(1100, 1000, generator=numbers))
    convolution = torch.randn(8, 3, 3, 3, generator=numbers).to(memory_format=torch.channels_last)
    sometimes = torch.randn(9, generator=numbers) * 1e-42 if number == 5 else None
    # Two virtual batches cancel each other, and what remains of the others in a float sum depends on the order.
    cancelling = torch.randn(2000, generator=numbers)
    if number in (2, 5):
        cancelling += torch.arange(2000) * (2.0**30 if number == 2 else -(2.0**30))
    return [large * 4.0**-number, convolution, sometimes, None, cancelling]


def given(share: list[int], bad: float | None) -> list[str]:
    """Gradients as they are written above; with `bad` in one of them."""
    shapes = (torch.zeros(1100, 1000), torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last))
    parameters = [nn.Parameter(shape) for shape in (*shapes, torch.zeros(9), torch.zeros(4), torch.zeros(2000))]
    exact = ExactGradients(parameters, VIRTUAL_BATCHES)
    for number in share:
        for parameter, gradient in zip(parameters, gradients(number), strict=True):
            parameter.grad = gradient
        if bad is not None and number == 3 and parameters[1].grad is not None:
            parameters[1].grad = parameters[1].grad.clone()
            parameters[1].grad[2, 1, 0, 1] = bad
        exact.add()
    exact.finish(VIRTUAL_BATCHES * SAMPLES)
    return [digest(parameter.grad) for parameter in parameters]


def of_ddp(accelerator: Accelerator, share: list[int]) -> list[str]:
    """Gradients of a net that DDP wraps; and the statistics of its BatchNorm."""
    torch.manual_seed(0)
    layers: Sequence[nn.Module] = (nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten())
    net = nn.Sequential(*layers, nn.Linear(6 * 36, 10)).to(memory_format=torch.channels_last)
    model = accelerator.prepare_model(net)
    exact = ExactGradients(list(net.parameters()), VIRTUAL_BATCHES)
    norm, statistics = net[1], []
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
    norm.momentum = 1.0
    for number in share:
        numbers = torch.Generator().manual_seed(number)
        images, labels = torch.randn(SAMPLES, 1, 8, 8, generator=numbers), torch.arange(SAMPLES)
        with accelerator.no_sync(model):
            F.cross_entropy(model(images), labels, reduction="sum").backward()
        exact.add()
        statistics.append(norm.running_mean.clone())
    exact.finish(VIRTUAL_BATCHES * SAMPLES)
    rows = torch.stack(statistics) if statistics else torch.empty(0, 6)
    return [digest(value) for value in (*(p.grad for p in net.parameters()), exact_sum(rows, VIRTUAL_BATCHES))]


def main() -> None:
    launch = prepare_environment()
    accelerator = create_accelerator(launch)
    found: dict[str, list[str]] = {}
    for name, share in shares(accelerator.num_processes).items():
        mine = share[accelerator.process_index]
        found[f"given, {name}"] = given(mine, None)
        for bad in ("nan", "-inf"):
            found[f"{bad}, {name}"] = given(mine, float(bad))
        if name != "all at the last":  # DDP's first forward pass is collective: it broadcasts the buffers
            found[f"DDP, {name}"] = of_ddp(accelerator, mine)
    Path(sys.argv[1], f"{launch.rank}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
