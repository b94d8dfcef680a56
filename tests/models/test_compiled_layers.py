"""BatchNorm over virtual batches and dropout by samples under torch.compile: no graph more than torch's own and no
break, nothing that keeps CUDA graphs from being recorded, and the results of the layers as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import convert_dropout
from accel_train.models.nets import mnist_cnn

BATCH, VIRTUAL_BATCH = 8, 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # With its cache a graph that was compiled before would not come to the backend.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


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


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        BatchNormAct2d(6, momentum=0.3),
        nn.Flatten(),
        nn.Linear(54, 5),
        nn.BatchNorm1d(5, affine=False),
    )


def images(seed: int) -> Tensor:
    return torch.randn(BATCH, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


def train_and_evaluate(model: nn.Module, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Four updates of two micro-batches, the third with padding, and an evaluation after the second and the last.

    Returns the outputs of the evaluations, and the weights and buffers afterwards.
    """
    batches = VirtualBatches(model, VIRTUAL_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for update in range(4):
        model.train()
        weights = (torch.arange(BATCH) < (6 if update == 2 else BATCH)).float()
        for micro_batch in range(2):
            batches.begin(weights, padded=update == 2)
            (run(images(10 * update + micro_batch)).square().sum(1) * weights).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        batches.sum_processes()
        batches.end_update()
        if update % 2:
            model.eval()
            with torch.inference_mode():
                found[f"output after update {update}"] = run(images(99)).clone()
    return {**found, **{name: value.detach().clone() for name, value in model.state_dict().items()}}


@pytest.mark.ci
@pytest.mark.parametrize("real", [BATCH, 6, None], ids=["training", "padded", "evaluation"])
def test_no_break(real: int | None) -> None:
    model = net().train(real is not None)
    batches = VirtualBatches(model, VIRTUAL_BATCH)
    if real is not None:
        batches.begin((torch.arange(BATCH) < real).float(), padded=real < BATCH)
    found = torch._dynamo.explain(model)(images(0))
    assert (found.graph_count, found.graph_break_count, found.break_reasons) == (1, 0, [])


@pytest.mark.slow
def test_inductors_results_are_those_of_the_layers_as_they_are() -> None:
    """From one graph for training, with and without padding, and one for evaluation, as torch's own."""
    eager, model, backend = net(), net(), Inductor()
    expected = train_and_evaluate(eager, eager)
    found = train_and_evaluate(model, torch.compile(model, backend=backend, dynamic=False))
    assert backend.graphs == 2 and not backend.changed
    assert found.keys() == expected.keys() and int(found["1.num_batches_tracked"]) == 4
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)  # type: ignore[misc]
