"""models/trial.py: a pass over two virtual batches that is not two passes is found, and nothing else is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from odd_models import Capacity, Centred, Experts, Initialised, Recomputed, Restless, SharedNorm, TwoViews
from timm.layers import EvoNorm2dB0
from timm.models.efficientvit_msra import ResidualDrop
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchvision.ops import FrozenBatchNorm2d

from accel_train.models.trial import try_model
from accel_train.models.verdict import Verdict

DROP = {"drop_rate": 0.1, "drop_path_rate": 0.2}
# Name, size of the images, options, and whether the model calls functions that draw.
MODELS = [
    (
        "vit_tiny_patch16_224",
        32,
        {"img_size": 32, "depth": 3, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1, **DROP},
        False,
    ),
    ("swin_tiny_patch4_window7_224", 64, {"img_size": 64, "window_size": 4, "attn_drop_rate": 0.1, **DROP}, False),
    ("convnext_atto", 32, DROP, False),
    ("resnet10t", 32, DROP, True),
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


def tried(model: nn.Module, size: int = 32) -> Verdict:
    """The verdict of a model, which must be as before, as the generators."""
    model.train()
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    verdict = try_model(model, 3, size)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
    assert torch.get_rng_state().equal(states[0]) and random.getstate() == states[1]
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    return verdict


class ClassToken(nn.Module):
    """Gives a parameter to a layer as its input, as CaiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix = nn.Parameter(torch.randn(1, 12)), nn.Bilinear(12, 12, 8)
        self.embed, self.head = nn.Linear(3 * 8 * 8, 12), nn.Linear(8, 10)
        self.scale = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        values = self.embed(images.flatten(1))
        return self.head(self.mix(values, self.scale(self.token).expand_as(values)))


def test_a_parameter_may_be_the_input_of_a_layer() -> None:
    verdict = tried(ClassToken(), 8)
    assert (verdict.together, verdict.obstacles()) == ("", ())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "options", "functions"), MODELS)
def test_models_of_timm_and_torchvision(name: str, size: int, options: dict, functions: bool) -> None:
    verdict = tried(created(name, options), size)
    assert (verdict.together, verdict.functions, verdict.obstacles()) == ("", functions, ())
    # The loss is that of `logits` alone, so a pass leaves out GoogLeNet's auxiliary classifiers.
    assert verdict.leaves_out == (name == "torchvision/googlenet")


@pytest.mark.parametrize(
    "middle",
    [
        nn.Dropout1d(0.2), nn.Dropout3d(0.2), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2),
        timm.layers.DropBlock2d(0.2, 3), torchvision.ops.DropBlock2d(0.2, 3), ResidualDrop(nn.Identity(), 0.2),
    ],
    ids=lambda middle: type(middle).__name__,
)  # fmt: skip
def test_rarer_kinds_of_dropout_are_seeded_by_virtual_batch(middle: nn.Module) -> None:
    """So they have the same bits on any number of processes, too: no obstacle to --bitwise."""
    if isinstance(middle, nn.Dropout1d):
        middle = nn.Sequential(nn.Flatten(2), middle)
    verdict = tried(Net(middle))
    assert type(middle).__name__ in verdict.together or "middle" in verdict.together
    assert not verdict.functions and not verdict.obstacles()


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


class Modes(nn.Module):
    """One function in training, another one in evaluation."""

    def __init__(self, training: object, evaluation: object) -> None:
        super().__init__()
        self.functions = evaluation, training

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[self.training](x)  # type: ignore[operator, no-any-return]


def same(x: Tensor) -> Tensor:
    return x


class TestTogether:
    @pytest.mark.parametrize(
        ("function", "told"),
        [
            (lambda x: x + 1e-9 * torch.rand(len(x), 1, 1, 1), "rand in middle (Call)"),
            (lambda x: x[:, torch.randperm(3)], "randperm in middle (Call)"),
            (lambda x: x * F.dropout(torch.ones(3, 4, 4), 0.001), "bernoulli_ in middle (Call)"),  # for all samples
            (lambda x: x + 1e-9 * random.random(), "random in the model"),
            (lambda x: x + 1e-9 * np.random.rand(), "numpy.random in the model"),
            (lambda x: F.dropout(x, 0.1) * torch.rand(len(x), 1, 1, 1), "rand in middle (Call)"),
            (lambda x: x - x.mean(0), "the output of the model for a sample"),
            (lambda x: x * (1 + 0.01 * x.std(0)), "the output of the model for a sample"),
            (wrong_order, "the output of the model for a sample"),
            (lambda x: torchvision.ops.drop_block2d(x, 0.3, 3), "middle (Call)"),
            (EvoNorm2dB0(3), "the output of the model for a sample"),
        ],
    )
    def test_what_draws_for_all_samples_or_couples_them(self, function: Any, told: str) -> None:
        verdict = tried(Net(function if isinstance(function, nn.Module) else Call(function)))
        assert told in verdict.together and not verdict.functions

    @pytest.mark.parametrize("p", [0.5, 1e-4])
    def test_functions_need_the_mode(self, p: float) -> None:
        verdict = tried(Net(Modes(lambda x: F.dropout(x, p), same)))
        assert verdict == Verdict(functions=True)

    @pytest.mark.parametrize("middle", [Call(lambda x: x * 1e300 * 1e300), Call(lambda x: x * float("nan"))])
    def test_values_that_are_not_finite_say_nothing(self, middle: nn.Module) -> None:
        assert tried(Net(middle)) == Verdict()

    def test_rows_that_are_not_sample_by_sample(self) -> None:
        assert "the output of the model" in tried(TwoViews(5, 3)).together

    @pytest.mark.parametrize("shared", [False, True])
    def test_parts_that_are_computed_again(self, shared: bool) -> None:
        together = tried(Recomputed(5, 3, shared)).together
        assert together and (not shared or "the dropout layer drop is called several times" in together)

    def test_experts_with_a_capacity_are_always_found_and_others_never(self) -> None:
        for seed in range(20):
            torch.manual_seed(seed)
            assert tried(Capacity(5, 3), 8).together
            assert seed > 3 or not tried(Capacity(5, 3, limited=False), 8).together

    def test_a_transformer_with_gradient_checkpointing(self) -> None:
        model = created("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, **DROP})
        model.set_grad_checkpointing(True)  # type: ignore[operator]
        assert tried(model) == Verdict()

    def test_a_model_that_computes_in_float32(self) -> None:
        class Single(Net):
            def forward(self, images: Tensor) -> Tensor:
                return super().forward(images.float())

        assert tried(Single(nn.BatchNorm2d(3))) == Verdict()
        assert tried(Single(Call(lambda x: x - 0.1 * x.mean(0)))).together


class TestState:
    def test_an_initialisation_by_the_data(self) -> None:
        verdict = tried(Initialised(5, 3))
        assert verdict.initialised == "bias" and "the parameter bias" in verdict.obstacles()[-1]

    def test_a_generator_of_its_own(self) -> None:
        own: tuple[object, ...] = np.random.default_rng(0), random.Random(0)
        functions = [
            lambda x: x * own[0].random(),  # type: ignore[attr-defined]
            lambda x: x * own[1].random(),  # type: ignore[attr-defined]
        ]
        for function in functions:
            verdict = tried(Net(Modes(function, same)))
            assert verdict.state and "has a random generator of its own, or another state" in verdict.obstacles()[0]

    def test_draws_that_are_seeded_are_no_state(self) -> None:
        function = lambda x: x * torch.rand(1) * random.random() * np.random.rand()  # noqa: E731
        verdict = tried(Net(Modes(function, same)))
        assert verdict.together and verdict.obstacles() == ()

    def test_a_model_that_fails_is_told(self) -> None:
        def fail(x: Tensor) -> Tensor:
            raise ValueError("needs labels\nsecond line")

        (warning,) = tried(Net(Call(fail))).obstacles()
        assert "could not check" in warning and "(needs labels)" in warning


class TestEvaluation:
    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x - x.mean(0),
            lambda x: x * torch.rand(1),
            lambda x: F.dropout(x, 0.5),
            lambda x: x * np.random.rand(),
        ],
    )
    def test_what_an_evaluation_may_not_do(self, function: object) -> None:
        (warning,) = tried(Net(Modes(same, function))).obstacles()
        assert "in evaluation the output for a sample depends on the others" in warning

    def test_batchnorm_without_running_statistics(self) -> None:
        middle = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False, affine=False))
        (warning,) = tried(Net(middle)).obstacles()
        assert "track_running_stats=False" in warning


class WithBuffer(nn.Module):
    """Changes its buffer by a function of (buffer, input), in place."""

    value: Tensor

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(3))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.value.copy_(self.change(self.value, x))
        return x


class Table(nn.Module):
    """Keeps a table for as many samples as it has just seen."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) != len(x):
            self.table = torch.ones(len(x))
        return x * self.table.view(-1, 1, 1, 1)


class TestBuffers:
    @pytest.mark.parametrize(
        ("middle", "changing"),
        [
            (nn.BatchNorm2d(3), ""),  # VirtualBatches takes care of it
            (FrozenBatchNorm2d(3), ""),
            (nn.InstanceNorm2d(3), ""),
            (nn.InstanceNorm2d(3, track_running_stats=True), "middle.running_mean (InstanceNorm2d)"),
            (spectral_norm(nn.Conv2d(3, 3, 1)), "middle.parametrizations.weight.0._u (_SpectralNorm)"),
            (Centred(), "middle.mean (Centred)"),
            (WithBuffer(lambda value, x: value + 1), "middle.value (WithBuffer)"),  # a counter
            (WithBuffer(lambda value, x: x.mean((0, 2, 3))), "middle.value (WithBuffer)"),  # of the last pass
            (
                WithBuffer(lambda value, x: value if value.any() else x.std((0, 2, 3))),
                "middle.value (WithBuffer)",
            ),  # the first
            (
                WithBuffer(lambda value, x: torch.maximum(value, x.abs().amax((0, 2, 3)).clamp(10))),
                "middle.value (WithBuffer)",
            ),  # the largest so far: the images that are tried have no larger one
            (WithBuffer(lambda value, x: torch.ones(3)), ""),  # a table
            (WithBuffer(lambda value, x: torch.ones(3) * torch.nan), ""),
            (Table(), ""),
        ],
    )
    def test_what_a_pass_changes(self, middle: nn.Module, changing: str) -> None:
        assert tried(Net(middle)).changing[:1] == ((changing,) if changing else ())


class Alternating(nn.Module):
    """Uses its layer in every other pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Conv2d(3, 3, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) if self.calls % 2 else x


class TestParameters:
    def test_those_that_a_pass_leaves_out(self) -> None:
        class Unused(nn.Identity):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 2)

        unused, frozen = Unused(), Unused()
        frozen.layer.requires_grad_(False)
        assert tried(Net(unused)).leaves_out and tried(Net(Alternating())).leaves_out
        assert not any(tried(Net(middle)).leaves_out for middle in (frozen, nn.Dropout(0.5), nn.BatchNorm2d(3)))

    @pytest.mark.parametrize(
        "decides",
        [
            lambda x: random.random() < 2,
            lambda x: torch.rand(()) < 2,
            lambda x: x.mean().item() < 1e9,
            lambda x: bool((x > 1e9).any()) or True,
        ],
    )
    def test_those_that_it_may_leave_out(self, decides: Callable[[Tensor], Any]) -> None:
        """All passes of the trial used them, by a decision that may be another one in training."""
        assert tried(Net(Call(lambda x: x if decides(x) else x * 2))).leaves_out

    def test_the_models_of_the_tests_with_processes(self) -> None:
        assert all(tried(model).leaves_out for model in (SharedNorm(5, 3), Experts(5, 3), Restless(5, 3)))


class OfParts(nn.Module):
    """A BatchNorm over what each of some functions makes of the images' features [b, 3]."""

    def __init__(self, *parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.parts = nn.BatchNorm1d(3), parts

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean((2, 3))
        return torch.stack([features, *(self._normalised(part(features), len(x)) for part in self.parts)]).sum(0)

    def _normalised(self, rows: Tensor, samples: int) -> Tensor:
        normalised = self.norm(rows)
        if len(rows) % samples:
            return normalised.mean(0).expand(samples, -1)
        return torch.stack(normalised.chunk(len(rows) // samples)).sum(0)


def own(x: Tensor) -> Tensor:
    return x


def two_of_each(x: Tensor) -> Tensor:
    return torch.cat([x, 2 * x])


def prototypes(x: Tensor) -> Tensor:
    return x.new_ones(8, 3)  # as many as four, or two, of each sample


def all_but_one(x: Tensor) -> Tensor:
    return x[1:] if len(x) > 1 else x


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        ([own], False),
        ([two_of_each], True),
        ([own, own], False),
        ([], False),
        ([prototypes], True),
        ([own, prototypes], True),
        ([all_but_one], True),
    ],
)
def test_for_whose_values_a_batchnorm_is_called(parts: list[Callable[[Tensor], Tensor]], together: bool) -> None:
    verdict = tried(nn.Sequential(nn.Conv2d(3, 3, 3), OfParts(*parts)))
    assert bool(verdict.together) == together
