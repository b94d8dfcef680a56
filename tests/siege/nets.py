"""Small models that nobody thought of. Each is one line of BLOCKS: what is between a convolution and the classifier.

It gets and returns float32 [b, 8, h, w]. `--model.name nets.py:net --model.kwargs '{"block": NAME}'` trains one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchvision.ops import StochasticDepth

C = 8  # channels


def net(num_classes: int, in_chans: int, block: str) -> nn.Module:
    """A convolution, the block, the mean over the pixels, a linear classifier."""
    first = nn.Conv2d(in_chans, C, 3, padding=1)
    return nn.Sequential(
        first, BLOCKS[block](), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, num_classes)
    )


class Block(nn.Module):
    """A function of (this module, x), with parts and buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def conv() -> nn.Conv2d:
    return nn.Conv2d(C, C, 3, padding=1)


def param(*shape: int, **options: Any) -> nn.Parameter:
    """Return a parameter whose values differ, without drawing."""
    count = int(np.prod(shape))
    return nn.Parameter((torch.arange(count) % 7 * 0.1 - 0.3).reshape(shape).to(**options))


def tokens(x: Tensor) -> Tensor:
    """Return the pixels as a sequence: [b, h * w, 8]."""
    return x.flatten(2).mT


def image(sequence: Tensor, like: Tensor) -> Tensor:
    return sequence.mT.reshape(like.shape)


def tied() -> nn.Module:
    pair = nn.Sequential(conv(), nn.ReLU(), conv())
    pair[2].weight = pair[0].weight
    return pair


def in_evaluation_mode() -> nn.Module:
    """A BatchNorm that never leaves evaluation mode."""
    norm = nn.BatchNorm2d(C).eval()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    return norm


def keep_mean(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
    return x - self.mean[:, None, None]


def count(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * (1 + 0.01 * self.calls)


def codebook(self: Any, x: Tensor) -> Tensor:
    """Vector quantisation whose code book is a running mean."""
    nearest = torch.cdist(tokens(x), self.codes.expand(len(x), -1, -1)).argmin(-1)
    if self.training:
        hot = F.one_hot(nearest, len(self.codes)).float().flatten(0, 1)
        mean = hot.mT @ tokens(x).detach().flatten(0, 1) / hot.sum(0)[:, None].clamp(1)
        self.codes.lerp_(mean, 0.1)
    return x + (image(self.codes[nearest], x) - x).detach()


def grown(self: Any, x: Tensor) -> Tensor:
    """A part that is created in the first forward pass."""
    if self.inner is None:
        self.inner = nn.Conv2d(x.shape[1], C, 1)
    return self.inner(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def hooked() -> nn.Module:
    layer = conv()
    layer.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return layer


def lstm(self: Any, x: Tensor) -> Tensor:
    return image(self.lstm(tokens(x))[0], x)


def over_the_batch(self: Any, x: Tensor) -> Tensor:
    """Attention from each sample to the others, as batch_first=False does with images by mistake."""
    means = x.mean((2, 3))[:, None]  # [b, 1, 8]: to the layer a sequence of b
    return x + self.attention(means, means, means)[0][:, 0, :, None, None]


def encoder(*, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(C, 2, 16, dropout=0.1, batch_first=batch_first)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Block(lambda self, x: image(self.stack(tokens(x)), x), stack=stack)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    # Normalisation
    "BatchNorm": lambda: nn.BatchNorm2d(C),
    "BatchNorm, called twice": lambda: Block(lambda self, x: self.norm(self.norm(x) + 3), norm=nn.BatchNorm2d(C)),
    "BatchNorm, cumulative": lambda: nn.BatchNorm2d(C, momentum=None),
    "BatchNorm, no running statistics": lambda: nn.BatchNorm2d(C, track_running_stats=False),
    "BatchNorm, not affine": lambda: nn.BatchNorm2d(C, affine=False),
    "BatchNorm, always in evaluation": in_evaluation_mode,
    "BatchNorm on prototypes": lambda: Block(
        lambda self, x: x + self.norm(self.prototypes).mean(0)[:, None, None],
        prototypes=param(5, C), first=nn.BatchNorm2d(C), norm=nn.BatchNorm1d(C),
    ),
    "BatchNorm2d, then BatchNorm1d on prototypes": lambda: Block(
        lambda self, x: self.first(x) + self.norm(self.prototypes).mean(0)[:, None, None],
        prototypes=param(5, C), first=nn.BatchNorm2d(C), norm=nn.BatchNorm1d(C),
    ),
    "BatchNorm of one pixel": lambda: Block(
        lambda self, x: x * self.norm(x.mean((2, 3), keepdim=True)), norm=nn.BatchNorm2d(C)
    ),
    "BatchNorm in every other pass": lambda: Block(
        lambda self, x: self.norm(x) if x.sum() > 0 else x, norm=nn.BatchNorm2d(C)
    ),
    "InstanceNorm, running statistics": lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, C),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    "normalised over the batch": lambda: Block(lambda self, x: (x - x.mean(0)) / (x.std(0, correction=0) + 1)),
    # Buffers
    "a running mean": lambda: Block(keep_mean, mean=torch.zeros(C)),
    "a counter": lambda: Block(count, calls=torch.tensor(0)),
    "an integer buffer": lambda: Block(lambda self, x: x[:, self.order], order=torch.arange(C).flip(0)),
    "a code book": lambda: Block(codebook, codes=param(4, C).detach()),
    "an attribute that counts": lambda: Block(count, calls=0),
    "spectral_norm": lambda: parametrizations.spectral_norm(conv()),
    "the largest value seen": lambda: Block(
        lambda self, x: x / self.most.copy_(torch.maximum(self.most, x.detach().abs().max())), most=torch.tensor(1.0)
    ),
    # Parameters
    "unused": lambda: Block(lambda self, x: self.used(x), used=conv(), unused=conv()),
    "unused in some passes": lambda: Block(lambda self, x: self.inner(x) if x.sum() > 0 else x, inner=conv()),
    "frozen": lambda: conv().requires_grad_(False),
    "float64": lambda: Block(lambda self, x: self.inner(x.double()).float(), inner=conv().double()),
    "bfloat16": lambda: Block(lambda self, x: self.inner(x.bfloat16()).float(), inner=conv().bfloat16()),
    "complex": lambda: Block(
        lambda self, x: torch.fft.ifft2(torch.fft.fft2(x) * self.gain[:, None, None]).real,
        gain=param(C, dtype=torch.complex64),
    ),
    "zero-size": lambda: Block(lambda self, x: x + self.nothing.sum(), nothing=param(0, C)),
    "a scalar": lambda: Block(lambda self, x: x * self.gain, gain=nn.Parameter(torch.tensor(1.0))),
    "sparse gradients": lambda: Block(
        lambda self, x: x + image(self.table((tokens(x)[..., 0] * 10).long().clamp(0, 9)), x),
        table=nn.Embedding(10, C, sparse=True),
    ),
    "EmbeddingBag": lambda: Block(
        lambda self, x: x + self.table((x.flatten(1) * 10).long().clamp(0, 9))[..., None, None],
        table=nn.EmbeddingBag(10, C),
    ),
    "tied": tied,
    "shared, called twice": lambda: Block(lambda self, x: self.inner(self.inner(x)), inner=conv()),
    "weight_norm": lambda: parametrizations.weight_norm(conv()),
    "orthogonal": lambda: Block(
        lambda self, x: image(self.inner(tokens(x)), x), inner=parametrizations.orthogonal(nn.Linear(C, C))
    ),
    "old weight_norm": lambda: nn.utils.weight_norm(conv()),
    "a list": lambda: Block(
        lambda self, x: x + sum(weight[:, None, None] for weight in self.weights),
        weights=nn.ParameterList([param(C), param(C)]),
    ),
    "a dictionary": lambda: Block(lambda self, x: x * self.weights["a.b"[:1]][:, None, None],
                                  weights=nn.ParameterDict({"a": param(C)})),
    "lazy": lambda: nn.LazyConv2d(C, 1),
    "created in the first pass": lambda: Block(grown, inner=None),
    "a hook on the gradient": hooked,
    "expanded": lambda: Block(lambda self, x: x * self.gain.expand(C, 1, 1), gain=param(1, 1, 1)),
    "channels last": lambda: conv().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    # Chance
    "Dropout": lambda: nn.Dropout(0.2),
    "F.dropout": lambda: Block(lambda self, x: F.dropout(x, 0.2, self.training)),
    "Dropout2d": lambda: nn.Dropout2d(0.2),
    "AlphaDropout": lambda: nn.AlphaDropout(0.2),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.2),
    "stochastic depth by sample": lambda: StochasticDepth(0.2, "row"),
    "stochastic depth by batch": lambda: StochasticDepth(0.2, "batch"),
    "RReLU": nn.RReLU,
    "rand_like": lambda: Block(lambda self, x: x + 0.1 * torch.rand_like(x)),
    "noise in training only": lambda: Block(lambda self, x: x + 0.1 * torch.randn_like(x) if self.training else x),
    "gumbel_softmax": lambda: Block(lambda self, x: x * F.gumbel_softmax(x.mean((2, 3)), hard=True)[..., None, None]),
    "gumbel_softmax in training only": lambda: Block(
        lambda self, x: x * F.gumbel_softmax(x.mean((2, 3)))[..., None, None] if self.training else x
    ),
    "randperm over the batch": lambda: Block(
        lambda self, x: 0.9 * x + 0.1 * x[torch.randperm(len(x))] if self.training else x
    ),
    "bernoulli": lambda: Block(lambda self, x: x * torch.bernoulli(torch.full_like(x, 0.8)) if self.training else x),
    "numpy's chance": lambda: Block(lambda self, x: x * float(np.random.rand()) if self.training else x),
    "Python's chance": lambda: Block(lambda self, x: x * random.random() if self.training else x),
    "a generator of its own": lambda: Block(
        lambda self, x: x * torch.rand((), generator=self.generator) if self.training else x,
        generator=torch.Generator().manual_seed(1),
    ),
    "fractional pooling": lambda: Block(lambda self, x: F.interpolate(self.pool(x), x.shape[2:]),
                                        pool=nn.FractionalMaxPool2d(2, output_ratio=0.7)),
    # Sequences and attention
    "LSTM": lambda: Block(lstm, lstm=nn.LSTM(C, C, batch_first=True)),
    "LSTM, dropout": lambda: Block(lstm, lstm=nn.LSTM(C, C, 2, batch_first=True, dropout=0.2)),
    "GRU over the batch": lambda: Block(lambda self, x: image(self.gru(tokens(x))[0], x), gru=nn.GRU(C, C)),
    "attention": lambda: Block(
        lambda self, x: image(self.attention(*[tokens(x)] * 3)[0], x),
        attention=nn.MultiheadAttention(C, 2, dropout=0.1, batch_first=True),
    ),
    "attention over the batch": lambda: Block(over_the_batch, attention=nn.MultiheadAttention(C, 2)),
    "an encoder": lambda: encoder(batch_first=True),
    "an encoder over the batch": lambda: encoder(batch_first=False),
    "scaled_dot_product_attention": lambda: Block(
        lambda self, x: image(F.scaled_dot_product_attention(*[tokens(x)] * 3, dropout_p=0.1 * self.training), x)  # type: ignore[arg-type, misc]
    ),
    # How it is computed
    "checkpointed": lambda: Block(
        lambda self, x: checkpoint(self.inner, x, use_reentrant=False),
        inner=nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU(), nn.Dropout(0.1)),
    ),
    "checkpointed, reentrant": lambda: Block(
        lambda self, x: checkpoint(self.inner, x, use_reentrant=True),
        inner=nn.Sequential(conv(), nn.BatchNorm2d(C), nn.ReLU()),
    ),
    "checkpointed twice": lambda: Block(
        lambda self, x: checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False),
        inner=nn.Sequential(conv(), nn.BatchNorm2d(C), nn.Dropout(0.1)),
    ),
    "in place": lambda: nn.Sequential(nn.BatchNorm2d(C), nn.ReLU(inplace=True), conv(), nn.Dropout(0.1, inplace=True)),
    "a function of its own": lambda: Block(lambda self, x: Doubled.apply(x)),
    "a Fourier transform": lambda: Block(lambda self, x: torch.fft.fft2(x).abs().log1p()),
    "interpolation": lambda: nn.Sequential(nn.Upsample(scale_factor=1.7, mode="bilinear"), nn.AdaptiveMaxPool2d(8)),
    "index_add": lambda: Block(lambda self, x: x.index_add(1, self.where, x[:, :4]), where=torch.tensor([0, 0, 1, 1])),
    "a sort over the batch": lambda: Block(lambda self, x: x + x.sort(0).values),
    "the first of the batch": lambda: Block(lambda self, x: x - x[:1].detach()),
    "fake quantisation": lambda: torch.ao.quantization.FakeQuantize(),
    "no gradient": lambda: Block(lambda self, x: x.detach()),
    "a loop of random length": lambda: Block(
        lambda self, x: [x := self.inner(x) for _ in range(1 + int(torch.randint(2, ())))][-1], inner=conv()
    ),
}  # fmt: skip
