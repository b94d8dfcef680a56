"""The options of binary cross entropy are timm's; a loss of a user's own function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor

from accel_train.config.checks import contradictions
from accel_train.config.options import parse
from accel_train.config.schema import Config, Loss
from accel_train.errors import UserError
from accel_train.optim.loss import check_loss, create_checked_loss, create_loss
from accel_train.task import ONE_LABEL

CODE = """
import torch
import torch.nn.functional as F

def good(logits, targets):
    return F.cross_entropy(logits, targets, reduction="none")

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


def own_loss(tmp_path: Path, name: str, *, mixes: bool = False, weights: Tensor | None = None, **settings: Any) -> Any:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    loss = Loss(name=f"{path}:{name}", **settings)
    criterion = create_loss(loss, weights)
    check_loss(loss, criterion, 5, torch.device("cpu"), ONE_LABEL, mixes=mixes)
    return criterion


@pytest.mark.parametrize("mixes", [False, True])
def test_the_user_s_loss_is_the_loss(tmp_path: Path, mixes: bool) -> None:
    logits, labels = torch.randn(6, 5), torch.arange(6) % 5
    targets = F.one_hot(labels, 5).float() if mixes else labels
    weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0])
    expected = F.cross_entropy(logits, targets, reduction="none")
    assert torch.equal(own_loss(tmp_path, "good", mixes=mixes)(logits, targets), expected)
    weighted = own_loss(tmp_path, "good", mixes=mixes, weights=weights)(logits, targets)
    assert torch.allclose(weighted, expected * weights[labels])
    assert torch.equal(
        own_loss(tmp_path, "focal", mixes=mixes)(logits, targets), (1 - (-expected).exp()) ** 2 * expected
    )


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
    ],
)
def test_what_is_wrong_with_a_loss_is_one_line(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        own_loss(tmp_path, name, **settings)
    assert message in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])
SOFT = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)).softmax(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
def test_it_is_timms_loss(threshold: float | None, smoothing: float) -> None:
    options = Loss(name="binary_cross_entropy", label_smoothing=smoothing, bce_target_threshold=threshold)
    loss = create_loss(options, None)
    expected = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
    torch.testing.assert_close(loss(LOGITS, LABELS).mean(), expected(LOGITS, LABELS))
    # timm's Mixup has smoothed such targets; here the loss does.
    torch.testing.assert_close(loss(LOGITS, SOFT).mean(), expected(LOGITS, SOFT * (1 - smoothing) + smoothing / 4))


def written_from_the_page(name: str, folder: Path) -> Path:
    """Write the file `name` of docs/own.md into a folder."""
    page = (Path(__file__).parents[2] / "docs/own.md").read_text()
    (folder / name).write_text(page.split(f"```python\n# {name}\n")[1].partition("```")[0])
    return folder / name


def test_factors_of_what_is_there_are_timms_pos_weight(tmp_path: Path) -> None:
    path = written_from_the_page("rare.py", tmp_path)
    logits, targets = LOGITS[:, :2], (SOFT[:, :2] > 0.25).float()
    loss = create_checked_loss(Loss(name=f"{path}:rare"), targets, 2, CPU, mixes=False)
    expected = BinaryCrossEntropy(smoothing=0.0, pos_weight=torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(loss(logits, targets).mean(), expected(logits, targets))


def test_own_weights_of_the_classes_as_the_page_has_them(tmp_path: Path) -> None:
    written_from_the_page("weighted.py", tmp_path)
    logits, labels = torch.randn(10, 10, generator=torch.Generator().manual_seed(0)), torch.arange(10)
    loss = create_checked_loss(Loss(name=f"{tmp_path}/weighted.py:weighted"), labels, 10, CPU, mixes=False)
    weights = torch.tensor([1, 1, 2.5, 1, 1, 1, 1, 0.5, 1, 1])
    torch.testing.assert_close(loss(logits, labels), create_loss(Loss(), None)(logits, labels) * weights[labels])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss.bce-target-threshold 0.2", "--loss.bce-target-threshold: expected its default unless"),
        ("--loss.name bce --loss.bce-target-threshold 1", "at least 0 and below 1"),
        ("--augment.mix-mode element", "Did you mean 'elem'?"),
    ],
)
def test_what_does_not_fit_together_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(["digits", *words.split()])
    assert message in str(error.value) and len(error.value.messages) == 1


def test_a_loss_of_one_s_own_smooths_the_targets_itself() -> None:
    config = Config(loss=Loss(name="mine.py:good", label_smoothing=0.1))
    assert contradictions(config)["loss.label-smoothing"].startswith("0 with a loss of your own")
