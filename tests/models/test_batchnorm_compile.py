"""BatchNorm over virtual batches under torch.compile: no graph more than torch's own and no break, nothing that keeps
CUDA graphs from being recorded, and results of inductor that are those of the layers as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from test_dropout_compile import Inductor
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from accel_train.models.batchnorm import VirtualBatches

BATCH, VIRTUAL_BATCH = 8, 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    # With its cache a graph that was compiled before would not come to the backend.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


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
