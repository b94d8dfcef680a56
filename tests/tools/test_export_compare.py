"""An export is compared with the run's model before it is called done."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

from accel_train.errors import UserError
from accel_train.records.model_info import ModelInfo
from accel_train.tools.export import Loaded, compare

INFO = ModelInfo(("a", "b"), 1, 2, 2, (0.5,), (0.5,))
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
    if name in ("is the model", "differs by less than is told"):
        assert "from 8 equal inputs the logits differ by at most" in compare(run, EXPORTS[name])
    else:
        with pytest.raises(UserError, match=r"from equal inputs the logits differ .* The export was not written"):
            compare(run, EXPORTS[name])
