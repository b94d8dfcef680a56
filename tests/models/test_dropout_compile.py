"""models/dropout under torch.compile: whole nets of several layers give one graph, which changes no input, and the
gradients of the same model without compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from accel_train.models.dropout import convert_dropout
from accel_train.models.nets import mnist_cnn


def transformer() -> nn.Module:
    rates = {"pos_drop_rate": 0.1, "attn_drop_rate": 0.2, "proj_drop_rate": 0.1, "drop_path_rate": 0.5}
    sizes = {"img_size": 28, "patch_size": 14, "embed_dim": 24, "num_heads": 2, "depth": 2}
    return timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **sizes, **rates)


def shared() -> nn.Module:
    """A net that calls one layer twice."""
    drop = nn.Dropout(0.3)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), drop, nn.Linear(32, 32), drop, nn.Linear(32, 10))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mnist_cnn": lambda: mnist_cnn(10, 1, 28),
    # torch.compile (2.15) made wrong code for an odd number of elements.
    "odd": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 867), nn.Dropout(0.3), nn.Linear(867, 10)),
    "shared": shared,
    "transformer": transformer,
}


class Inductor:
    """torch's default backend; notes how many graphs it compiles, and which inputs they change.

    An input that is changed and has no fixed address keeps a graph from being captured as a CUDA graph.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.changed: list[int] = []

    def __call__(self, graph: Any, inputs: Sequence[Tensor]) -> Any:
        self.graphs += 1
        return compile_fx(graph, inputs, inner_compile=self.inner)

    def inner(self, *arguments: Any, **options: Any) -> Any:
        compiled: Any = compile_fx_inner(*arguments, **options)
        self.changed += set(compiled.mutated_input_idxs) - set(options.get("static_input_idxs") or ())
        return compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_a_compiled_net_is_the_same(name: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = NETS[name]().train()
    models = plain, copy.deepcopy(plain)
    keys = [convert_dropout(model, 5) for model in models]
    x, ids = torch.randn(6, 1, 28, 28), 7 * torch.arange(6) + 3
    # Each run tries its model before it is compiled, and so learns which layers are called again.
    keys[1].set_samples(ids, 0)
    models[1](x)
    keys[1].set_samples(ids, 0)
    explained = torch._dynamo.explain(models[1])(x)
    assert explained.graph_count == 1 and explained.graph_break_count == 0, explained.break_reasons

    torch.compiler.reset()
    backend = Inductor()
    functions = models[0], torch.compile(models[1], backend=backend)
    for update in range(3):
        results = []
        for function, model, own_keys in zip(functions, models, keys, strict=True):
            own_keys.set_samples(ids, update)
            model.zero_grad()
            logits = function(x)  # type: ignore[operator]
            logits.square().sum().backward()
            results.append([logits, *(parameter.grad for parameter in model.parameters())])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert backend.graphs == 1 and not backend.changed
