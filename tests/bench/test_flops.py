"""Operations of known layers, and the peaks of known devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_train.bench.flops import count_flops, peak_flops, training_flops
from accel_train.config.schema import Data, Model
from accel_train.data.sources.load import load_splits


def test_a_linear_layer() -> None:
    # Forward and the weights' gradient: two operations a multiply-add. Nobody asks for the input's gradient.
    assert count_flops(nn.Linear(30, 7, bias=False), torch.zeros(5, 30, device="meta")) == 2 * (2 * 5 * 30 * 7)


def test_a_convolution_behind_another() -> None:
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1, bias=False)
    one, two = 2 * 16 * 16 * 8 * 3 * 9, 2 * 16 * 16 * 4 * 8
    assert count_flops(nn.Sequential(first, second), torch.zeros(1, 3, 16, 16, device="meta")) == 2 * one + 3 * two


def test_a_recipes_model_counts_in_proportion_to_the_images() -> None:
    splits = load_splits(Data(name="synthetic", channels=1, image_size=28), 0)
    of_one, of_four = (training_flops(Model(name="mnist_cnn"), splits, 28, samples) for samples in (1, 4))
    convolutions = 2 * (26 * 26 * 32 * 9 + 24 * 24 * 64 * 32 * 9)
    layers = 2 * (9216 * 128 + 128 * 10)
    assert of_one == 3 * (convolutions + layers) - 2 * 26 * 26 * 32 * 9
    assert of_four == 4 * of_one


def test_a_layer_that_needs_values_is_not_guessed() -> None:
    class Picky(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * inputs.max().item()

    assert count_flops(Picky(), torch.zeros(2, 2, device="meta")) is None


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "fp16", 756.5e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # it has no such units
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),  # a slice
        ("NVIDIA RTX A1000", "bf16", None),  # neither an A100 nor an A10
        ("NVIDIA GH200 480GB", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_peaks_are_known_or_not_said(device: str, precision: str, expected: float | None) -> None:
    assert peak_flops(device, precision) == expected
