"""An export is compared with the run's model before it is called done."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.tools.export.compare import Images, check
from accel_train.tools.export.formats import Loaded

INFO = ModelInfo(("a", "b"), 1, 2, 2, (0.5,), (0.5,))
INPUTS = torch.randn(5, 1, 2, 2, generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()


def nan_in_one(images: Tensor) -> Tensor:
    logits: Tensor = MODEL(images).clone()
    logits[-1, 0] = math.nan
    return logits


EXPORTS: dict[str, Loaded] = {
    "is the model": MODEL,
    "differs by less than is told": lambda images: MODEL(images) + 9e-4,
    "differs": lambda images: MODEL(images) + 2e-3,
    "differs for a batch of one": lambda images: MODEL(images) + (len(images) == 1),
    "gives NaN": nan_in_one,
    "gives NaN for a batch of one": lambda images: MODEL(images) * (math.nan if len(images) == 1 else 1),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_equal_inputs_give_equal_logits(name: str) -> None:
    run: Any = SimpleNamespace(model=MODEL, info=INFO)
    lines = check(run, EXPORTS[name], {}, Images("5 random images", INPUTS, ()))
    assert "for 5 random images" in next(lines)
    if name in ("is the model", "differs by less than is told"):
        assert "not compared" in next(lines)
    else:
        with pytest.raises(UserError, match=r"from equal inputs the logits differ .* The export was not written"):
            next(lines)
