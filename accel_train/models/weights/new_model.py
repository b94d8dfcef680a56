"""The model of a new run, on its device, with the weights that it begins from.

These may be of a model with other classes, another number of channels or another image size (loading.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from timm.layers import convert_sync_batchnorm
from torch import nn

from accel_train.config.schema import Config
from accel_train.keyed import key
from accel_train.models.factory import create_model
from accel_train.models.weights.hub import Weights


def create_new_model(
    config: Config,
    accelerator: Accelerator,
    classes: Sequence[str],
    channels: int,
    size: int,
    weights: Weights | None,
    *,
    published: bool,
) -> tuple[nn.Module, tuple[str, ...], str]:
    """The model on the device, warnings, and which `weights` were loaded ("" for None).

    Weights that are not loaded or published follow from the seed alone.
    """
    fetches = config.model.pretrained and published
    with accelerator.main_process_first() if fetches else nullcontext():  # one process downloads
        torch.manual_seed(key(config.seed, "weights"))
        model = create_model(
            config.model,
            num_classes=len(classes),
            channels=channels,
            image_size=size,
            published=published,
            origin=config.origin,
        )
    loaded = ""
    if weights is not None:
        from accel_train.models.weights.loading import load_into

        loaded = load_into(model, weights, classes, channels)
    model = model.to(accelerator.device)
    if not config.model.sync_batchnorm:
        return model, (), loaded
    if accelerator.device.type == "cuda":  # torch supports it only on GPUs
        return convert_sync_batchnorm(model), (), loaded
    kind = accelerator.device.type
    return model, (f"model.sync_batchnorm: not available on {kind}; BatchNorm counts over virtual batches",), loaded
