"""Randomness as a pure function of keys: no generator, no state, nothing to save.

Every function here works on int64 tensors used as 64-bit words (products and sums wrap around), and gives the same
bits on every kind of device.

The hash is SplitMix64: a Weyl sequence whose terms are scrambled by a bijective finaliser (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; the constants are its `mix64variant13`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WORD = (1 << 64) - 1


def signed(word: int) -> int:
    """The int64 with the same 64 bits as the unsigned `word`."""
    word &= WORD
    return word - (1 << 64) if word >> 63 else word


def key(*parts: int | str) -> int:
    """A 64-bit word that depends on every part and on their order: (7, 1) and (8, 0) give unrelated words.

    Returns an int in the range of int64.
    """
    word = 0
    for part in parts:
        for value in part.encode() if isinstance(part, str) else (part,):
            word = (word + GOLDEN + value) & WORD
            word = ((word ^ (word >> 30)) * MIX_1) & WORD
            word = ((word ^ (word >> 27)) * MIX_2) & WORD
            word ^= word >> 31
    return signed(word)


def shift(words: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 `words` (torch's own copies the sign bit)."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def scramble(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words; int64 of any shape, returned in the same shape."""
    # In place: allocating memory would cost more than the arithmetic.
    words = shift(words, 30).bitwise_xor_(words).mul_(signed(MIX_1))
    words = shift(words, 27).bitwise_xor_(words).mul_(signed(MIX_2))
    return shift(words, 31).bitwise_xor_(words)


def hashed(word: int | Tensor, numbers: Tensor) -> Tensor:
    """Term `numbers` of the SplitMix64 sequence with seed `word`, or with one for each; int64 of any shape, returned in
    the same shape."""
    return scramble(numbers * signed(GOLDEN) + word)


def uniform(keys: Tensor, stream: int) -> Tensor:
    """Number `stream` of each key's own sequence of uniform numbers in [0, 1).

    `keys` is int64 of any shape; returns float32 of that shape with 24 random bits each, exact on every device.
    """
    return uniforms(keys, (stream,))[0]


def uniforms(keys: Tensor, streams: Sequence[int]) -> Tensor:
    """Several numbers of each key's sequence, `uniform` of each of `streams`, in one go; float32 [streams, *keys]."""
    words = torch.stack([keys + signed((stream + 1) * GOLDEN) for stream in streams])
    return shift(scramble(words), 40).to(torch.float32) * 2.0**-24


def permuted(positions: Tensor, size: int, word: int) -> Tensor:
    """The elements at `positions` of the permutation of 0..size-1 with key `word`, in constant time and memory.

    A generalised Feistel network on a grid of a x b >= size numbers with cycle-walking: a result outside the range
    is passed through the network again (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002,
    methods 2 and 3). a*b exceeds `size` by less than a, so few numbers need that.

    `positions` is int64 of any shape, each in 0..size-1; `size` up to 2^60; returns int64 of the same shape.
    """
    a = max(1, int(size**0.5))
    while a * a < size:
        a += 1
    b = -(-size // a)
    keys = [key(word, number) for number in range(_rounds(size))]
    numbers = _feistel(positions.reshape(-1), a, b, keys)
    outside = (numbers >= size).nonzero()[:, 0]
    while len(outside):
        walked = _feistel(numbers[outside], a, b, keys)
        numbers[outside] = walked
        outside = outside[walked >= size]
    return numbers.view(positions.shape)


SMALL = 256  # numbers: smaller permutations need more rounds


def _rounds(size: int) -> int:
    # Chi-square tests of neighbours over 300 000 keys detect nothing after 8 rounds for 31 numbers and more. After 6
    # rounds they detect a pattern for up to 97 numbers; 8 rounds are too few for 16 numbers, and 16 rounds too few for
    # 5 and 6 numbers, because each round of a small grid has few different sums to add.
    return 8 if size >= SMALL else 24


def _feistel(numbers: Tensor, a: int, b: int, keys: Sequence[int]) -> Tensor:
    """A bijection of 0..a*b-1, of `numbers` int64 [n]. Each round adds to one coordinate, modulo its side, a hash of
    the other."""
    left, right = numbers % a, numbers // a
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + shift(hashed(even, right), 2)) % a
        right = (right + shift(hashed(odd, left), 2)) % b
    return left + right * a


# Code of others draws from the global generators: they are seeded with a key before it is called.


def seed_generators(key: int) -> None:
    """Seed the global generators of torch (on the CPU), NumPy and Python."""
    torch.default_generator.manual_seed(key)
    np.random.seed(key % 2**32)
    random.seed(key)


def seed_pass(seed: int, accelerator: Accelerator, update: int, number: int, *, bitwise: bool = True) -> None:
    """Seed what a model may draw from in forward pass `number` of this process in `update`: a restart draws the same.

    `bitwise`: the pass is one virtual batch, and the seed follows from its number in the update, in which the
    processes take turns (data/order.py): so all that a model draws is the same on any number of processes, also
    from NumPy's and Python's generators.
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    if bitwise:
        process, number = 0, number * processes + process  # as on one process without --bitwise
    word = key(seed, "dropout", update, process, number)
    # torch.manual_seed seeds the generators of all kinds of devices, present or not. That takes 0.1 to 0.4 ms, as long
    # as an update of a small network on a GPU.
    if accelerator.device.type != "cpu":
        torch.get_device_module(accelerator.device).manual_seed(word)
    if bitwise:
        seed_generators(word)
    else:
        torch.default_generator.manual_seed(word)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore at the end what `seed_generators` changes."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
