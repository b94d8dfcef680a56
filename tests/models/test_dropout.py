"""models/dropout: masks are a function of the seed, update, sample and layer, and have torch's distribution."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import timm.layers
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel_train.errors import UserError
from accel_train.models.dropout import DropoutKeys, KeyedFunctions, convert_dropout

IDS = 7 * torch.arange(12) + 3
LAYERS = {
    "dropout": (lambda: nn.Dropout(0.3), (5, 3)),
    "dropout of odd size": (lambda: nn.Dropout(0.3), (3, 17, 17)),
    "dropout2d": (lambda: nn.Dropout2d(0.3), (9, 5, 4)),
    "drop path": (lambda: timm.layers.DropPath(0.4), (3, 2)),
    "drop path, not scaled": (lambda: timm.layers.DropPath(0.4, scale_by_keep=False), (3, 2)),
    "stochastic depth": (lambda: torchvision.ops.StochasticDepth(0.4, "row"), (3, 2)),
    "attention": (lambda: SelfAttention(), (5, 16)),
}


class SelfAttention(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 4, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def converted(module: nn.Module, seed: int = 5) -> tuple[nn.Sequential, DropoutKeys]:
    model = nn.Sequential(module).train()
    return model, convert_dropout(model, seed)


def values(shape: tuple[int, ...], count: int = len(IDS)) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


def masks(p: float, count: int, size: int, *, update: int = 0, seed: int = 5, layer: int = 0, calls: int = 1) -> Tensor:
    """What three layers of rate `p` keep: float32 [count, size] of the last call of one of them."""
    model = nn.Sequential(nn.Dropout(p), nn.Dropout(p), nn.Dropout(p)).train()
    keys = convert_dropout(model, seed)
    keys.set_samples(torch.arange(count), update)
    for _ in range(calls):
        result = model[layer](torch.ones(count, size))
    return (result > 0).float()


class TestPurity:
    @pytest.mark.parametrize("name", LAYERS)
    def test_a_sample_is_treated_alike_in_any_batch(self, name: str) -> None:
        create, shape = LAYERS[name]
        model, keys = converted(create())
        x = values(shape)

        def run(which: Tensor, update: int = 3) -> Tensor:
            keys.set_samples(IDS[which], update)
            return model(x[which])

        everything = torch.arange(len(IDS))
        state = torch.get_rng_state()
        whole = run(everything)
        for cut in ([1, 11], [6, 6], [4, 4, 4], [1] * 12, [5, 7]):
            parts = [run(part) for part in everything.split(cut)]
            torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-6 if name == "attention" else 0)
        shuffled = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(run(shuffled), whole[shuffled])
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(run(everything, update=4), whole)
        model.eval()
        assert name == "attention" or torch.equal(run(everything), x)

    @given(st.integers(1, 5), st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def test_windows_are_parts_of_their_sample(self, windows: int, cut: list[int]) -> None:
        model, keys = converted(nn.Dropout(0.5))
        x = torch.ones(sum(cut) * windows, 3)
        keys.set_samples(torch.arange(sum(cut)), 0)
        whole, parts = model(x), []
        for ids in torch.arange(sum(cut)).split(cut):
            keys.set_samples(ids, 0)
            parts.append(model(x[: len(ids) * windows]))
        assert torch.equal(torch.cat(parts), whole)


class TestDistribution:
    @pytest.mark.parametrize("p", [0.5, 0.1, 0.003])
    def test_kept_as_often_as_asked_and_independent(self, p: float) -> None:
        count, size = 1000, 401
        found = masks(p, count, size)
        variance = p * (1 - p)
        assert abs(float(found.mean()) - (1 - p)) < 5 * math.sqrt(variance / found.numel())
        # The variance of a mean of independent draws, of rows and of columns, within 5 standard errors.
        for dimension, summed in ((1, size), (0, count)):
            ratio = float(found.mean(dimension).var()) / (variance / summed)
            assert abs(ratio - 1) < 5 * math.sqrt((2 + 1 / variance / summed) / (found.numel() / summed - 1))
        # Other samples, positions (four share a hash), layers, updates, seeds and calls tell nothing.
        others = [found.roll(1, 0), *(found.roll(lag, 1) for lag in (1, 2, 3, 4, 8))]
        settings = [{"layer": 1}, {"update": 1}, {"seed": 6}, {"calls": 2}]
        for other in [*others, *(masks(p, count, size, **setting) for setting in settings)]:
            correlation = float(((found - (1 - p)) * (other - (1 - p))).mean()) / variance
            assert abs(correlation) < 5 / math.sqrt(found.numel())

    @pytest.mark.parametrize("p", [1e-9, 1e-4, 0.1, 1 / 3, 0.5, 0.9, 0.99999, 1.0])
    def test_the_scale_fits_the_rate_that_is_used(self, p: float) -> None:
        keys = DropoutKeys(0, ["one"])
        keys.set_samples(torch.arange(4), 0)
        mask = keys.mask(0, (4, 100), p)
        assert mask is not None and abs(mask.kept - (1 - p)) <= 2.0**-17
        assert (mask.kept * 65536).is_integer()  # as many of 65536 values of 16 bits are kept
        assert mask.kept * mask.scale == (1 if mask.kept else 0)


class TestValues:
    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_the_gradient_is_the_mask_times_the_scale(
        self, inplace: bool, dtype: torch.dtype, layout: torch.memory_format
    ) -> None:
        model, keys = converted(nn.Dropout(0.25, inplace))
        keys.set_samples(IDS, 0)
        x = values((4, 5, 3)).to(dtype).contiguous(memory_format=layout).requires_grad_()
        found = model(x * 1)
        expected = keys.mask(0, x.shape, 0.25)  # the layer's second call
        assert expected is not None
        keys.set_samples(IDS, 0)
        first = keys.mask(0, x.shape, 0.25)
        assert first is not None and not torch.equal(first.keep, expected.keep)
        scale = torch.tensor(1 / 0.75, dtype=dtype)
        assert found.dtype == dtype and found.is_contiguous(memory_format=layout)
        torch.testing.assert_close(found, x * first.keep * scale)
        found.backward(torch.ones_like(found))
        assert x.grad is not None
        torch.testing.assert_close(x.grad, first.keep * scale)

    @pytest.mark.parametrize("create", [nn.Dropout, nn.Dropout2d, timm.layers.DropPath])
    def test_rate_0_keeps_and_rate_1_drops_everything(self, create: Callable[[float], nn.Module]) -> None:
        x = values((3, 4, 4)).requires_grad_()
        for p in (0.0, 1.0):
            model, keys = converted(create(p))
            keys.set_samples(IDS, 0)
            found = model(x)
            assert torch.equal(found, x * (1 - p))
            (gradient,) = torch.autograd.grad(found.sum(), x)
            assert torch.equal(gradient, torch.full_like(x, 1 - p))

    def test_only_the_mask_is_kept_for_the_backward_pass(self) -> None:
        model, keys = converted(nn.Dropout(0.25))
        keys.set_samples(IDS, 0)
        saved: list[torch.dtype] = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.dtype)
            return tensor

        x = values((4,)).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(x)
        assert saved == [torch.bool]

    def test_multihead_attention_is_torchs_without_dropout(self) -> None:
        plain = SelfAttention(1e-9).train()
        model, keys = converted(copy.deepcopy(plain))
        keys.set_samples(IDS, 0)
        x = values((5, 16))
        torch.testing.assert_close(model(x), plain(x))
        masked = model[0].attention(x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool())[0]  # type: ignore[operator]  # torch's own function
        torch.testing.assert_close(masked, plain.attention(x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool())[0])


class TestConversion:
    def test_names_weights_hooks_and_references_stay(self) -> None:
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, drop_rate=0.1, drop_path_rate=0.1)
        names = [name for name, _ in model.named_modules()]
        state, reference, calls = model.state_dict(), model.blocks[1].drop_path1, []
        reference.register_forward_hook(lambda *_: calls.append(1))
        keys = convert_dropout(model, 0)
        assert [name for name, _ in model.named_modules()] == names
        assert list(model.state_dict()) == list(state) and reference is model.blocks[1].drop_path1
        assert isinstance(reference, timm.layers.DropPath) and isinstance(model.head_drop, nn.Dropout)
        assert "blocks.1.drop_path1" in keys.layers
        model(torch.zeros(2, 3, 32, 32))
        assert calls == [1]

    def test_only_exact_classes(self) -> None:
        class Special(nn.Dropout):
            pass

        model = nn.Sequential(Special(0.5), nn.Dropout(0.5), nn.Linear(2, 2))
        assert convert_dropout(model, 0).layers == ("1",) and type(model[0]) is Special

    @pytest.mark.parametrize("name", ["dropout", "dropout2d", "drop path", "attention"])
    def test_without_samples_a_layer_is_the_librarys(self, name: str) -> None:
        create, shape = LAYERS[name]
        x, plain = values(shape), create().train()
        model, keys = converted(create())
        for forget in (lambda: None, lambda: keys.set_samples(IDS[:5], 0)):  # 12 is no multiple of 5
            forget()
            torch.manual_seed(3)
            found = model(x)
            torch.manual_seed(3)
            assert torch.equal(found, plain(x))
            keys.set_samples(IDS, 0)
            assert not torch.equal(model(x), found)

    def test_a_copy_has_the_same_masks(self) -> None:
        model, keys = converted(nn.Dropout(0.5))
        other = copy.deepcopy(model)
        keys.set_samples(IDS, 0)
        first = model(torch.ones(12, 9))
        keys.set_samples(IDS, 0)
        assert torch.equal(other(torch.ones(12, 9)), first)

    @pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "pvt_v2_b0"])
    def test_unfused_attention_is_the_same_function(self, name: str) -> None:
        torch.manual_seed(0)
        size = {"swin": {"img_size": 64, "window_size": 4}, "vit_": {"img_size": 64}}.get(name[:4], {})
        plain = timm.create_model(name, num_classes=5, attn_drop_rate=0.1, drop_path_rate=0.0, **size).train()
        model = copy.deepcopy(plain)
        keys = convert_dropout(model, 0)
        modules = [module for module in model.modules() if hasattr(module, "fused_attn") and module.attn_drop.p > 0]
        assert modules and not any(module.fused_attn for module in modules)
        results = []
        for each in (plain, model):
            for module in each.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            keys.set_samples(IDS[:2], 0)
            each(values((3, 64, 64), 2)).square().sum().backward()
            results.append([parameter.grad for parameter in each.parameters()])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


class Segments(nn.Module):
    """Layers in checkpointed segments, with a dropout layer for each; or with one that they share."""

    def __init__(self, reentrant: bool | None, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.drops = nn.ModuleList([nn.Dropout(0.4)] * 3 if shared else [nn.Dropout(0.4) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for linear, drop in zip(self.linears, self.drops, strict=True):

            def segment(x: Tensor, linear: nn.Module = linear, drop: nn.Module = drop) -> Tensor:
                return drop(torch.relu(linear(x)))

            x = segment(x) if self.reentrant is None else checkpoint(segment, x, use_reentrant=self.reentrant)
        return x


class TestRecomputation:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_the_masks_are_repeated(self, reentrant: bool) -> None:
        found = []
        for setting in (None, reentrant):
            model = Segments(setting).train()
            keys = convert_dropout(model, 0)
            x = values((16,)).requires_grad_()
            for update in range(3):
                keys.set_samples(IDS, update)
                model(x).square().sum().backward()
            found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        for one, other in zip(*found, strict=True):
            assert one is not None and torch.equal(one, other)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_layer_with_several_calls_is_refused(self, reentrant: bool) -> None:
        model = Segments(reentrant, shared=True).train()
        convert_dropout(model, 0).set_samples(IDS, 0)
        loss = model(values((16,)).requires_grad_()).sum()
        with pytest.raises(UserError, match=r"the dropout layer drops\.0 is called several times"):
            loss.backward()

    def test_in_another_thread(self) -> None:
        gradients = []
        for call in (lambda work: work(), lambda work: ThreadPoolExecutor(1).submit(work).result()):
            model = Segments(False).train()
            keys = convert_dropout(model, 0)
            keys.set_samples(IDS, 0)
            call(model(values((16,)).requires_grad_()).square().sum().backward)
            gradients.append([parameter.grad for parameter in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            assert torch.equal(one, other)


class Functions(nn.Module):
    """Draws with the function that KeyedFunctions redirects."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3, self.training), 0.3, self.training, inplace=True)


class TestFunctions:
    def test_functions_are_redirected(self) -> None:
        model, x = Functions().train(), values((4, 6, 5))
        keys = convert_dropout(model, 0)
        state = torch.get_rng_state()

        def run(which: slice, update: int = 0) -> Tensor:
            keys.set_samples(IDS[which], update)
            with KeyedFunctions(keys):
                return model(x[which])

        whole = run(slice(None))
        assert torch.equal(torch.cat([run(slice(5)), run(slice(5, None))]), whole)
        assert not torch.equal(run(slice(None), 1), whole) and torch.equal(torch.get_rng_state(), state)
        model.eval()
        assert torch.equal(run(slice(None)), model(x))
