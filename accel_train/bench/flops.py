"""Floating-point operations of a model, and the peak of a device."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from accel_train import models
from accel_train.config.schema import Model
from accel_train.data.sources.load import Splits

# Dense peaks in 1e12 operations a second, from NVIDIA's data sheets (which often print the peaks of sparse matrices,
# twice as high). The first entry whose words are all in the device's name counts; "HBM3" is the SXM form of the H100.
PEAKS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("H200", "NVL"), {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    (("H200",), {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    (("H100", "PCIe"), {"bf16": 756.5, "fp16": 756.5, "tf32": 378, "fp32": 51}),
    (("H100", "NVL"), {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60}),
    (("H100", "HBM3"), {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67}),
    (("A100",), {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}),
    (("V100", "SXM2"), {"fp16": 125, "fp32": 15.7}),
    (("V100", "PCIE"), {"fp16": 112, "fp32": 14}),
    (("L40S",), {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}),
    (("L4",), {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}),
    (("A10",), {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}),
    (("T4",), {"fp16": 65, "fp32": 8.1}),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak of a device in `precision` (bf16, fp16, tf32, fp32), in operations a second, or None."""
    name = re.split(r"[\s-]+", device_name)  # "NVIDIA A100-SXM4-80GB"
    for words, peaks in PEAKS:
        if {*words} <= {*name} and "MIG" not in name:  # MIG: only a part of the device
            known = peaks.get(precision)
            return None if known is None else known * 1e12
    return None


def training_flops(model: Model, splits: Splits, image_size: int, samples: int) -> int | None:
    """Return the operations of one forward and backward pass of the model over `samples` images, or None."""
    plain = dataclasses.replace(model, gradient_checkpointing=False)  # recomputation does not count
    network = models.create_model(
        plain, num_classes=len(splits.classes), channels=splits.channels, image_size=image_size, published=False
    )
    models.set_train_mode(network, model)
    return count_flops(network, torch.zeros(samples, splits.channels, image_size, image_size, device="meta"))


def count_flops(model: nn.Module, inputs: Tensor) -> int | None:
    """Return the operations of a forward and a backward pass, counted by torch.utils.flop_counter.

    A multiply-add counts as two. The model is moved to the meta device, where `inputs` is: nothing is computed. Returns
    None if a layer needs real values.
    """
    model.to("meta")
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            model(inputs).sum().backward()
    except (RuntimeError, NotImplementedError):
        return None
    return int(counter.get_total_flops())
