"""models/independence.py: what depends on how a batch is divided is found, and nothing else is."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import EvoNorm2dB0, convert_splitbn_model
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from accel_train.models.batchnorm import VirtualBatches
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout
from accel_train.models.independence import Independence, check_independence
from accel_train.models.trial import different_images

DROP = {"drop_rate": 0.1, "drop_path_rate": 0.2}
# Name, size of the images, options, and whether the model calls functions that draw.
MODELS = [
    (
        "vit_tiny_patch16_224",
        32,
        {"img_size": 32, "depth": 3, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1, **DROP},
        False,
    ),
    ("vit_tiny_patch16_224", 64, {"img_size": 64, "depth": 3, "patch_drop_rate": 0.25}, False),
    ("swin_tiny_patch4_window7_224", 64, {"img_size": 64, "window_size": 4, "attn_drop_rate": 0.1, **DROP}, False),
    ("convnext_atto", 32, DROP, False),
    ("resnet10t", 32, {"drop_block_rate": 0.1, **DROP}, True),
    ("efficientnet_b0", 32, DROP, True),
    ("efficientvit_m0", 64, {}, False),
    ("xcit_nano_12_p16_224", 64, {"img_size": 64, **DROP}, False),
    ("torchvision/swin_v2_t", 32, {"dropout": 0.1, "attention_dropout": 0.1}, True),
    ("torchvision/vit_b_16", 32, {"image_size": 32, "dropout": 0.1, "attention_dropout": 0.1}, False),
    ("torchvision/efficientnet_b0", 32, {}, False),
    ("torchvision/densenet121", 32, {"drop_rate": 0.01}, True),
    ("torchvision/alexnet", 64, {}, False),
    ("densenet121", 32, {"drop_rate": 0.1}, False),
    ("torchvision/swin_t", 64, {"dropout": 0.1, "attention_dropout": 0.1}, True),
    ("torchvision/convnext_tiny", 32, {}, False),
    ("torchvision/maxvit_t", 224, {}, False),
    ("torchvision/mobilenet_v3_small", 32, {}, False),
    ("torchvision/googlenet", 96, {"aux_logits": True, "init_weights": False}, False),
    ("mobilenetv3_small_050", 64, DROP, True),
    ("ghostnet_050", 64, {"drop_rate": 0.1}, True),
    ("starnet_s1", 64, DROP, True),
    ("coat_tiny", 64, {"img_size": 64, **DROP}, False),
    ("sequencer2d_s", 64, {"img_size": 64, **DROP}, False),
    ("cait_xxs24_224", 64, {"img_size": 64, "attn_drop_rate": 0.1, **DROP}, False),
    ("volo_d1_224", 64, {"img_size": 64, **DROP}, False),
    ("tnt_s_legacy_patch16_224", 64, {"img_size": 64, **DROP}, False),
    ("nest_tiny_jx", 64, {"img_size": 64, **DROP}, False),
    ("pvt_v2_b0", 64, {"attn_drop_rate": 0.1, **DROP}, False),
    ("hiera_tiny_224", 64, {"img_size": 64, **DROP}, False),
    ("mixer_s32_224", 64, {"img_size": 64, **DROP}, False),
    ("regnetx_002", 64, DROP, False),
    ("levit_128s", 224, {}, False),
    ("fastvit_t8", 64, DROP, False),
    ("beit_base_patch16_224", 64, {"img_size": 64, "attn_drop_rate": 0.1, **DROP}, False),
]


def created(name: str, options: dict) -> nn.Module:
    torch.manual_seed(0)
    if name.startswith("torchvision/"):
        model = torchvision.models.get_model(name.removeprefix("torchvision/"), weights=None, num_classes=10, **options)
    else:
        model = timm.create_model(name, num_classes=10, **options)
    return model.train()


def checked(
    model: nn.Module, size: int = 32, *, normalised: bool = True, recomputes: bool = False, bitwise: bool = False
) -> tuple[Independence, DropoutKeys]:
    keys = convert_dropout(model.train(), 0)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)] if normalised else []
    result = check_independence(model, different_images(3, size), keys, norms, recomputes=recomputes, bitwise=bitwise)
    return result, keys


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "options", "functions"), MODELS)
def test_models_of_timm_and_torchvision(name: str, size: int, options: dict, functions: bool) -> None:
    model = created(name, options)
    result, keys = checked(model, size)
    assert result == Independence(functions, ())
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert check_independence(model, different_images(3, size), keys, norms, bitwise=True) == result
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(0.01 * (not parameter.any()))  # a last layer of zeros would hide everything
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1))
    ids = 3 * torch.arange(8) + 1

    def run(which: Tensor) -> Tensor:
        keys.set_samples(ids[which], 2)
        with KeyedFunctions(keys) if functions else nullcontext(), torch.no_grad():
            output = model(images[which])
        return output if isinstance(output, Tensor) else output[0]

    everything = torch.arange(8)
    whole = run(everything)
    for cut in ([4, 4], [1, 7], [3, 2, 3]):
        parts = torch.cat([run(part) for part in everything.split(cut)])
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))


class Net(nn.Module):
    """A linear model of the images' averages, [b, 3, h, w] -> [b, 10], with a `middle` before the classifier."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.middle = middle
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.middle(F.adaptive_avg_pool2d(images, 4)).flatten(1))


class Call(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator]


def wrong_order(x: Tensor) -> Tensor:
    """Samples are not in the first dimension."""
    return F.dropout(x.transpose(0, 1).flatten(0, 1), 0.001).view(3, -1, 4, 4).transpose(0, 1)


class TestDraws:
    @pytest.mark.parametrize(
        ("function", "told"),
        [
            (lambda x: x + 1e-9 * torch.rand(len(x), 1, 1, 1), "rand in middle (Call)"),
            (lambda x: x[:, torch.randperm(3)], "randperm in middle (Call)"),
            (lambda x: x * F.dropout(torch.ones(3, 4, 4), 0.001), "bernoulli_ in middle (Call)"),  # for all samples
            (lambda x: x + 1e-9 * random.random(), "random in the model"),
            (lambda x: x + 1e-9 * np.random.rand(), "numpy.random in the model"),
        ],
    )
    def test_what_is_out_of_reach_is_told(self, function: object, told: str) -> None:
        result, _ = checked(Net(Call(function)))
        assert not result.needs_functions
        assert len(result.warnings) == 1 and told in result.warnings[0] and "another model" in result.warnings[0]

    @pytest.mark.parametrize("p", [0.5, 1e-4])
    def test_functions_need_the_mode(self, p: float) -> None:
        assert checked(Net(Call(lambda x: F.dropout(x, p))))[0] == Independence(True, ())

    def test_the_mode_is_used_for_what_it_reaches(self) -> None:
        result, _ = checked(Net(Call(lambda x: F.dropout(x, 0.1) * torch.rand(len(x), 1, 1, 1))))
        assert result.needs_functions and "rand in middle" in result.warnings[0]
        result, _ = checked(nn.Sequential(Net(Call(lambda x: F.dropout(x, 0.1))), Call(lambda x: x * torch.rand(()))))
        assert result.needs_functions and len(result.warnings) == 1 and "rand in 1 (Call)" in result.warnings[0]

    def test_many_places_are_counted(self) -> None:
        result, _ = checked(Net(nn.Sequential(*(Call(lambda x: x * torch.rand(1)) for _ in range(5)))))
        assert "middle.2 (Call) and 2 more" in result.warnings[0]

    def test_a_layer_for_all_samples_is_told(self) -> None:
        net = Net(nn.Identity())
        net.table, net.drop = nn.Parameter(torch.ones(3, 4, 4)), nn.Dropout(0.1)
        net.middle = Call(lambda x: x + net.drop(net.table))
        assert "bernoulli_ in drop (Dropout)" in checked(net)[0].warnings[0]

    @pytest.mark.ci
    def test_a_rate_of_0_draws_nothing(self) -> None:
        model = created("maxxvit_rmlp_nano_rw_256", {"img_size": 64})  # drops parts of a table of positions
        assert "rel_pos.mlp.drop1 (Dropout)" in checked(model, 64)[0].warnings[0]
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        assert check_independence(model, different_images(3, 64), convert_dropout(model, 0), norms).warnings == ()


class TestSamplesThatDependOnEachOther:
    def test_batchnorm_that_nobody_takes_care_of(self) -> None:
        model = created("resnet10t", {})
        (warning,) = checked(model, 64, normalised=False)[0].warnings
        assert "conv1.1 (BatchNorm2d)" in warning and "other samples" in warning
        assert checked(model, 64)[0].warnings == ()

    @pytest.mark.parametrize("bitwise", [False, True])
    def test_batchnorm_without_running_statistics(self, bitwise: bool) -> None:
        """In training it normalises virtual batches as the others do: only evaluation is told of."""
        middle = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False, affine=False))
        VirtualBatches(net := Net(middle), 4)
        (warning,) = checked(net, bitwise=bitwise)[0].warnings
        assert "model: middle.1 (BatchNorm2d): without running statistics" in warning and "Set track" in warning
        assert middle[1].running_mean is None and list(middle[1].buffers()) == []
        middle.append(Call(lambda x: x - x.mean(0)))
        assert "middle.2 (Call)" in checked(net, bitwise=bitwise)[0].warnings[1]

    def test_split_batchnorm(self) -> None:
        model = convert_splitbn_model(created("resnet10t", {}))
        split = {id(part) for module in model.modules() if hasattr(module, "aux_bn") for part in module.modules()}
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and id(module) not in split]
        keys = convert_dropout(model, 0)
        assert "BatchNorm" in check_independence(model, different_images(3, 64), keys, norms).warnings[0]

    @pytest.mark.parametrize(
        "middle",
        [
            EvoNorm2dB0(3),
            Call(lambda x: x - x.mean(0)),
            Call(lambda x: x * (1 + 0.01 * x.std(0))),
            Call(wrong_order),
            Call(lambda x: torchvision.ops.drop_block2d(x, 0.3, 3)),  # scales by what it kept of the batch
        ],
    )
    def test_other_layers(self, middle: nn.Module) -> None:
        (warning,) = checked(Net(middle))[0].warnings
        assert f"middle ({type(middle).__name__})" in warning and "other samples" in warning

    def test_before_a_draw(self) -> None:
        middle = nn.Sequential(EvoNorm2dB0(3), Call(lambda x: x * torch.rand(1)))
        draws, coupled = checked(Net(middle))[0].warnings
        assert "rand in middle.1" in draws and "middle.0 (EvoNorm2dB0)" in coupled

    @pytest.mark.parametrize("middle", [Call(lambda x: x * 1e30 * 1e30), Call(lambda x: x * float("nan"))])
    def test_values_that_are_not_finite_say_nothing(self, middle: nn.Module) -> None:
        assert checked(Net(middle))[0].warnings == ()


class Modes(nn.Module):
    """One function in training, another one in evaluation."""

    def __init__(self, training: object, evaluation: object) -> None:
        super().__init__()
        self.functions = evaluation, training

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[self.training](x)  # type: ignore[operator, no-any-return]


def same(x: Tensor) -> Tensor:
    return x


class TestBitwise:
    """Each forward pass of training is one virtual batch, and its random numbers are seeded."""

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x * torch.rand(len(x), 1, 1, 1),
            lambda x: x[torch.randperm(len(x))],
            lambda x: x * random.random() * np.random.rand(),
            lambda x: x - x.mean(0),
        ],
    )
    def test_training_may_draw_and_couple_samples(self, function: object) -> None:
        assert checked(Net(Modes(function, same)), bitwise=True)[0] == Independence(False, ())
        assert checked(Net(Modes(function, same)))[0].warnings

    def test_functions_still_draw_by_sample(self) -> None:
        for function in (lambda x: F.dropout(x, 0.1) * torch.rand(len(x), 1, 1, 1), wrong_order):
            assert checked(Net(Modes(function, same)), bitwise=True)[0] == Independence(True, ())

    def test_a_layer_of_two_checkpointed_segments_may_draw_as_torch_does(self) -> None:
        result, keys = checked(Shared(both=True), recomputes=True, bitwise=True)
        assert result == Independence(False, ()) and keys.released == {0}

    @pytest.mark.parametrize(
        ("function", "told"),
        [
            (lambda x: x - x.mean(0), "in evaluation the output of middle (Modes) for a sample depends on the others"),
            (lambda x: x * torch.rand(1), "draws random numbers in evaluation, too: rand in middle (Modes)"),
            (lambda x: F.dropout(x, 0.5), "draws random numbers in evaluation, too: bernoulli_ in middle (Modes)"),
            (lambda x: x * np.random.rand(), "draws random numbers in evaluation, too: numpy.random in the model"),
        ],
    )
    def test_evaluation_may_not(self, function: object, told: str) -> None:
        (warning,) = checked(Net(Modes(function, function)), bitwise=True)[0].warnings
        assert told in warning and "Choose another model" in warning

    def test_a_generator_of_its_own_is_told(self) -> None:
        own: tuple[object, ...] = torch.Generator(), np.random.default_rng(0), random.Random(0)
        functions = [
            lambda x: x * torch.rand(1, generator=own[0]),  # type: ignore[call-overload]
            lambda x: x * own[1].random(),  # type: ignore[attr-defined]
            lambda x: x * own[2].random(),  # type: ignore[attr-defined]
        ]
        for function in functions:
            (warning,) = checked(Net(Modes(function, same)), bitwise=True)[0].warnings
            assert "has a random generator of its own, or another state" in warning


class Shared(nn.Module):
    """One dropout layer that both checkpointed segments call, or only one of them."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.linears, self.drop = nn.ModuleList(nn.Linear(48, 48) for _ in range(2)), nn.Dropout(0.01)
        self.both, self.checkpoints = both, True

    def forward(self, images: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(images, 4).flatten(1)
        for number, linear in enumerate(self.linears):

            def segment(x: Tensor, linear: nn.Module = linear, drops: bool = self.both or number == 1) -> Tensor:
                return self.drop(linear(self.drop(x))) if drops else linear(x)

            x = checkpoint(segment, x, use_reentrant=False) if self.checkpoints else segment(x)
        return x


class TestRecomputation:
    def test_a_layer_of_one_segment_is_repeated(self) -> None:
        result, keys = checked(Shared(both=False), recomputes=True)
        assert result == Independence(False, ()) and not keys.released

    def test_a_layer_of_two_segments_draws_as_torch_does(self) -> None:
        model = Shared(both=True)
        result, keys = checked(model, recomputes=True)
        (warning,) = result.warnings
        assert "model.gradient_checkpointing: drop (Dropout)" in warning and keys.released == {0}
        gradients = []
        for model.checkpoints in (True, False):
            keys.set_samples(torch.arange(4), 0)
            torch.manual_seed(0)
            gradients.append(torch.autograd.grad(model(torch.ones(4, 3, 8, 8)).sum(), model.linears[0].bias)[0])  # type: ignore[arg-type]
        assert torch.equal(*gradients)

    def test_functions_would_not_be_repeated(self) -> None:
        (warning,) = checked(Net(Call(lambda x: F.dropout(x, 0.1))), recomputes=True)[0].warnings
        assert "bernoulli_ in middle" in warning

    def test_a_transformer_of_timms(self) -> None:
        model = created("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, **DROP})
        model.set_grad_checkpointing(True)  # type: ignore[operator]
        assert checked(model, recomputes=True)[0] == Independence(False, ())


class TestNothingChanges:
    @pytest.mark.parametrize("recomputes", [False, True])
    def test_model_and_generators(self, recomputes: bool) -> None:
        model = created("resnet10t", {"zero_init_last": True, **DROP}).train()
        model.layer1.eval()
        model(torch.randn(2, 3, 64, 64)).sum().backward()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        gradients = [parameter.grad for parameter in model.parameters()]
        values = [gradient.clone() for gradient in gradients if gradient is not None]
        modes, hooks = [module.training for module in model.modules()], [len(m._forward_hooks) for m in model.modules()]
        states = torch.get_rng_state(), random.getstate(), np.random.get_state(False)["state"]["key"].copy()
        keys = convert_dropout(model, 0)
        check_independence(model, different_images(3, 64), keys, recomputes=recomputes, bitwise=recomputes)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert all(one is p.grad for one, p in zip(gradients, model.parameters(), strict=True))
        assert all(torch.equal(one, other) for one, other in zip(values, gradients, strict=True))
        assert modes == [module.training for module in model.modules()]
        assert hooks == [len(module._forward_hooks) for module in model.modules()]
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        assert np.array_equal(np.random.get_state(False)["state"]["key"], states[2])
        assert keys.mask(0, (4, 1), 0.5) is None  # no samples

    def test_a_model_that_fails_is_told(self) -> None:
        def fail(x: Tensor) -> Tensor:
            raise ValueError("needs labels\nsecond line")

        (warning,) = checked(Net(Call(fail)))[0].warnings
        assert "could not check" in warning and "(needs labels)" in warning
