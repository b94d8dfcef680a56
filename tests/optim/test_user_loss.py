"""A loss of a user's own function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accel_train.config.schema import Loss
from accel_train.errors import UserError
from accel_train.optim.loss import check_loss, create_loss

CODE = """
import torch
import torch.nn.functional as F

def good(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")

def smooth(logits, targets, label_smoothing):
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)

class Focal(torch.nn.Module):
    def forward(self, logits, targets):
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (1 - torch.exp(-losses)) ** 2 * losses

focal = Focal()

def mean(logits, targets):
    return F.cross_entropy(logits, targets)

def detached(logits, targets):
    return good(logits.detach(), targets)

def coupled(logits, targets):
    return good(logits - logits.mean(0), targets)

def labels_only(logits, targets):
    return -logits.log_softmax(1).gather(1, targets[:, None])[:, 0]

def fails(logits, targets):
    return good(logits[:, :2], targets)
"""


def made(tmp_path: Path, name: str, *, mixes: bool = False, weights: Tensor | None = None, **settings: Any) -> Any:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    loss = Loss(name=f"{path}:{name}", **settings)
    criterion = create_loss(loss, weights)
    check_loss(loss, criterion, 5, torch.device("cpu"), mixes=mixes)
    return criterion


@pytest.mark.parametrize("mixes", [False, True])
def test_the_user_s_loss_is_the_loss(tmp_path: Path, mixes: bool) -> None:
    logits, labels = torch.randn(6, 5), torch.arange(6) % 5
    targets = F.one_hot(labels, 5).float() if mixes else labels
    weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0])
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert torch.equal(made(tmp_path, "good", mixes=mixes)(logits, targets), expected)
    weighted = made(tmp_path, "good", mixes=mixes, weights=weights)(logits, targets)
    assert torch.allclose(weighted, expected * weights[labels])
    smooth = F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    assert torch.equal(made(tmp_path, "smooth", mixes=mixes, label_smoothing=0.1)(logits, targets), smooth)
    assert torch.equal(made(tmp_path, "focal", mixes=mixes)(logits, targets), (1 - (-expected).exp()) ** 2 * expected)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "mean",
            {},
            "returned float32 [] for the logits of 4 samples; expected a float for each sample, [4]: leave out",
        ),
        ("detached", {}, "the loss has no gradient; compute it from the logits, without detach()"),
        ("coupled", {}, "the loss of a sample depends on the other samples beside it"),
        ("labels_only", {"mixes": True}, "RuntimeError: gather(): Expected dtype int32/int64 for index (mine.py, line"),
        ("fails", {}, "Target 2 is out of bounds (mine.py, line "),
        ("good", {"label_smoothing": 0.1}, "set --loss.label-smoothing 0, or add that argument"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        made(tmp_path, name, **settings)
    assert message in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)
