"""torch's internals that the check for NaN and infinite gradients depends on."""

import inspect

import pytest
import torch

from accel_train.optim.amp_internals import flag_nonfinite, scale_without_waiting


def test_the_scale_is_a_tensor_or_none() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scale_without_waiting(scaler) is None
    scaler.scale(torch.ones(1))
    scale = scale_without_waiting(scaler)
    assert scale is not None and scale.item() == 8.0


@pytest.mark.parametrize(("value", "expected"), [(1.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_a_nonfinite_value_sets_the_flag_and_no_value_changes(value: float, expected: float) -> None:
    tensors = [torch.tensor([3.0, value]), torch.tensor([2.0], dtype=torch.bfloat16)]
    copies = [tensor.clone() for tensor in tensors]
    flag = torch.zeros(())
    flag_nonfinite(tensors, flag, torch.ones(()))
    assert flag.item() == expected
    assert all(torch.equal(tensor, copy) or value != value for tensor, copy in zip(tensors, copies, strict=True))


def test_timms_ema_still_calls_the_method_that_is_replaced() -> None:
    from timm.utils import ModelEmaV3

    assert "self.apply_update_(" in inspect.getsource(ModelEmaV3.update)
    assert list(inspect.signature(ModelEmaV3.apply_update_).parameters) == ["self", "model", "decay"]
    assert "foreach" in inspect.signature(ModelEmaV3.__init__).parameters
    assert hasattr(ModelEmaV3, "_foreach_lerp_") or hasattr(torch, "_foreach_lerp_")
