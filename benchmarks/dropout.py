"""The time of dropout with keyed masks beside torch's own, forward and backward.

python benchmarks/dropout.py [--threads 2] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from accel_train.models.dropout import convert_dropout

CASES = (((64, 9216), 0.25), ((64, 128), 0.5), ((256, 9216), 0.25), ((256, 128), 0.5), ((64, 197, 384), 0.1))
TURNS = 40


def milliseconds(layer: Callable[[Tensor], Tensor], values: Tensor, gradient: Tensor) -> float:
    """One forward and backward pass."""
    began = time.perf_counter()
    layer(values).backward(gradient)
    if values.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", type=torch.device, default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'shape':>16} {'p':>5} {'torch':>8} {'keyed':>8} ms, median of {TURNS} turns")
    for shape, p in CASES:
        plain, keyed = nn.Dropout(p), nn.Sequential(nn.Dropout(p))
        keys = convert_dropout(keyed, 0)
        values = torch.randn(shape, device=options.device, requires_grad=True)
        gradient, ids = torch.randn_like(values), torch.arange(shape[0], device=options.device)
        times: dict[nn.Module, list[float]] = {plain: [], keyed: []}
        for turn in range(TURNS + 3):
            keys.set_samples(ids, turn)
            for layer in times:
                values.grad = None
                times[layer].append(milliseconds(layer, values, gradient))
        medians = [statistics.median(found[3:]) for found in times.values()]  # the first turns warm up
        print(f"{'x'.join(map(str, shape)):>16} {p:>5} {medians[0]:8.3f} {medians[1]:8.3f}")


if __name__ == "__main__":
    main()
