"""The options of binary cross entropy are timm's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timm.loss import BinaryCrossEntropy

from accel_train.config.options import parse
from accel_train.config.schema import Loss
from accel_train.errors import UserError
from accel_train.optim.loss import create_checked_loss, create_loss

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])
SOFT = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).softmax(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"bce_target_threshold": 0.2}, {"target_threshold": 0.2}),
        ({"bce_pos_weight": (3.0,)}, {"pos_weight": 3.0}),
        ({"bce_pos_weight": (1.0, 2.0, 0.5, 4.0)}, {"pos_weight": torch.tensor([1.0, 2.0, 0.5, 4.0])}),
        ({"bce_target_threshold": 0.0, "bce_pos_weight": (2.0,)}, {"target_threshold": 0.0, "pos_weight": 2.0}),
    ],
)
def test_it_is_timms_loss(ours: dict[str, Any], theirs: dict[str, Any], smoothing: float) -> None:
    loss = create_loss(Loss(name="binary_cross_entropy", label_smoothing=smoothing, **ours), None)
    expected = BinaryCrossEntropy(smoothing=smoothing, **theirs)
    torch.testing.assert_close(loss(LOGITS, LABELS).mean(), expected(LOGITS, LABELS))
    # timm's Mixup has smoothed such targets; here the loss does.
    torch.testing.assert_close(loss(LOGITS, SOFT).mean(), expected(LOGITS, SOFT * (1 - smoothing) + smoothing / 4))


def test_own_weights_of_the_classes_as_the_page_has_them(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/own.md").read_text()
    (tmp_path / "weighted.py").write_text(page.split("```python\n# weighted.py\n")[1].partition("```")[0])
    logits, labels = torch.randn(10, 10, generator=torch.Generator().manual_seed(0)), torch.arange(10)
    loss = create_checked_loss(Loss(name=f"{tmp_path}/weighted.py:weighted"), labels, 10, CPU, mixes=False)
    weights = torch.tensor([1, 1, 2.5, 1, 1, 1, 1, 0.5, 1, 1])
    torch.testing.assert_close(loss(logits, labels), create_loss(Loss(), None)(logits, labels) * weights[labels])


@pytest.mark.parametrize(
    ("loss", "labels", "message"),
    [
        (Loss(name="binary_cross_entropy", bce_pos_weight=(1.0,) * 3), LABELS, "found 3 numbers; expected one, or 4"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_weights_is_said(loss: Loss, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        create_checked_loss(loss, labels, 4, CPU, mixes=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.bce-target-threshold 0.2", "--loss.bce-target-threshold: expected its default unless"),
        ("--loss.name bce --loss.bce-target-threshold 1", "at least 0 and below 1"),
        ("--loss.name bce --loss.bce-pos-weight 0", "numbers greater than 0"),
        ("--augment.mix-mode element", "Did you mean 'elem'?"),
    ],
)
def test_what_does_not_fit_together_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(["digits", *words.split()])
    assert message in str(error.value) and len(error.value.messages) == 1
