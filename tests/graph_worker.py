"""`accel-train train --cuda-graph true` on CPUs: operations are recorded and replayed; gloo and DDP are real."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from pretend_cuda import Graph
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train.cli import main
from accel_train.optim import cuda_graph

_below_autograd: Any = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]


class OnCpu(Graph):
    def replay(self) -> None:
        with _below_autograd():
            super().replay()


class Recording(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(self, operation: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        # A process that records would wait for one that does not.
        assert operation.namespace != "c10d", f"{operation} is recorded"
        return self.graph.compute(operation, arguments, options or {})


@contextlib.contextmanager
def record(graph: Graph, **_: Any) -> Iterator[None]:
    with Recording(graph):
        yield
    with _below_autograd():
        graph.end()


torch.cuda.CUDAGraph, torch.cuda.graph = OnCpu, record  # type: ignore[assignment, misc]
check = cuda_graph._check
# Of the obstacles only the device is not one here.
cuda_graph._check = lambda config, accelerator, optimizer: check(config, OnCuda(accelerator), optimizer)  # type: ignore


class OnCuda:
    """An accelerator that says its device is CUDA's."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return torch.device("cuda", 0) if name == "device" else getattr(self.accelerator, name)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
