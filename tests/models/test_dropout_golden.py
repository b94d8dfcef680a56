"""models/dropout: the masks themselves, stored. Another mask would change all runs with dropout.

A digest here may change only if masks are meant to change. It covers three forward passes, because from the second one
on masks are computed together, and a fourth with another number of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import helpers
import pytest
import timm.layers
import torch
import torch.nn.functional as F
import torchvision
from test_dropout import SelfAttention
from torch import Tensor, nn

from accel_train import training_setup
from accel_train.cli import main
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout
from accel_train.models.verdict import Verdict


class Digest:
    """The hash of all masks and of what the layers keep."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()

    def add(self, values: Tensor) -> None:
        values = values.detach().cpu().contiguous()
        self.hash.update(f"{tuple(values.shape)} {values.dtype}".encode())
        self.hash.update(values.numpy().tobytes())

    def __str__(self) -> str:
        return self.hash.hexdigest()[:16]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """Inside, adds each mask that any layer gets."""
    digest, mask = Digest(), DropoutKeys.mask

    def recording(self: DropoutKeys, row: int, shape: Sequence[int], p: float) -> Any:
        found = mask(self, row, shape, p)
        if found is not None:
            digest.add(found.keep)
            digest.hash.update(found.kept.hex().encode())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(DropoutKeys, "mask", recording)
        yield digest


class Twice(nn.Module):
    """Calls a layer twice, and between the calls another one."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.other = nn.Dropout(0.4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.other(self.drop(x)))


class Windows(nn.Module):
    """Divides each sample into three windows."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.path = nn.Dropout(0.3), timm.layers.DropPath(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.path(x.reshape(-1, 5, 7)))


class Functions(nn.Module):
    """Draws by torch's function, twice."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3, self.training), 0.2, self.training)


def rates() -> nn.Module:
    """Rates that are rounded to 1/65536, or leave nothing or everything."""
    return nn.Sequential(*(nn.Dropout(p) for p in (1e-6, 1e-4, 1 / 3, 0.5, 0.999, 1.0)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mnist_cnn": (lambda: nn.Sequential(nn.Dropout(0.25), nn.Flatten(), nn.Dropout(0.5)), (6, 4, 4)),
    "odd sizes": (lambda: nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Dropout(0.7)), (3, 5, 7)),
    "rates": (rates, (33,)),
    "channels": (lambda: nn.Sequential(nn.Dropout2d(0.3), nn.Dropout2d(0.1)), (9, 3, 2)),
    "paths": (lambda: nn.Sequential(*(timm.layers.DropPath(n / 10) for n in range(1, 6))), (4, 3)),
    "stochastic depth": (lambda: nn.Sequential(torchvision.ops.StochasticDepth(0.4, "row"), nn.Dropout(0.2)), (6,)),
    "attention": (SelfAttention, (5, 16)),
    "twice": (Twice, (3, 7)),
    "windows": (Windows, (3, 5, 7)),
    "functions": (Functions, (4, 6, 5)),
}  # fmt: skip
MASKS = {
    "mnist_cnn": "ff9d42d063bbe7e8",
    "odd sizes": "877d1eda38929cc2",
    "rates": "ba7c18efb626e1a2",
    "channels": "3793c397f4bed537",
    "paths": "74869250efe7705c",
    "stochastic depth": "9dade058bc03ff6f",
    "attention": "1da2509df3839a91",
    "twice": "dae35e5379f17c6c",
    "windows": "13065f58fed9b3b2",
    "functions": "aafabd1549790761",
}


@pytest.mark.parametrize("name", CASES)
def test_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create, shape = CASES[name]
    model = nn.Sequential(create()).train()
    keys = convert_dropout(model, 5)
    with recorded(monkeypatch) as digest, KeyedFunctions(keys) if name == "functions" else nullcontext():
        for update, count in enumerate((12, 12, 12, 8)):
            keys.set_samples(7 * torch.arange(count) + 3, update)
            x = torch.ones(count, *shape).requires_grad_()
            found = model(x)
            digest.add(found != 0)
            found.sum().backward()
    assert str(digest) == MASKS[name]


RUN = """
mnist_cnn --data.name synthetic --data.channels 1 --model.image-size 28 --data.train-limit 40 --data.test-limit 8
--batch-size 16 --epochs 2
"""
RUNS = {
    "": "2743d0a3bdc65979",
    "--virtual-batch-size 4 --bitwise true": "ef88efa2a6d51cba",
    "--data.sampler balanced": "508cf74abe5b0c23",
}


@pytest.mark.parametrize("options", RUNS)
def test_masks_of_a_run(options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler draws some samples several times. Masks of the model's trial are left out."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(training_setup, "find_verdict", lambda *_, **__: Verdict())
    with recorded(monkeypatch) as digest:
        assert main(["train", *RUN.split(), *options.split(), "--output-dir", str(tmp_path / "run")]) == 0
    helpers.forget_accelerate()
    assert str(digest) == RUNS[options]
