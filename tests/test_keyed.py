"""The hash is SplitMix64, the permutation is valid, and both pass tests of randomness."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, kstest
from torch.utils._python_dispatch import TorchDispatchMode

from accel_train import keyed
from accel_train.keyed import hashed, key, permuted, scramble, shift, signed, uniform

# All keys are fixed: a test gives the same p-value each time. One of chance's own is below this once in a million.
CHANCE = 1e-6
words64 = st.integers(-(2**63), 2**63 - 1)


def scrambled(word: int) -> int:
    """SplitMix64's finaliser on Python's unbounded integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & keyed.WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & keyed.WORD
    return word ^ (word >> 31)


def p_value(counts: torch.Tensor, freedom: int, shrink: float = 1.0) -> float:
    """Return the p-value of the chi-square test that all `counts` have the same expectation."""
    counts = counts.double().flatten()
    expected = counts.mean()
    return float(chi2.sf(float(((counts - expected) ** 2 / expected).sum()) * shrink, freedom))


def p_values_over_epochs(size: int, epochs: int) -> Iterator[float]:
    """That all numbers are as likely in each place, all pairs in each two neighbouring ones, and all orders."""
    found = torch.stack([permuted(torch.arange(size), size, key(1, epoch, "order")) for epoch in range(epochs)])
    places = torch.bincount((found + torch.arange(size) * size).flatten(), minlength=size * size)
    # Rows and columns of this table have given sums: (size - 1)^2 of its cells are free.
    yield p_value(places, (size - 1) ** 2, (size - 1) / size)
    different = ~torch.eye(size, dtype=torch.bool)
    for at in range(size - 1) if size > 2 else ():
        pairs = torch.bincount(found[:, at] * size + found[:, at + 1], minlength=size * size)
        yield p_value(pairs.view(size, size)[different], size * (size - 1) - 1)
    if 2 < size < 6:
        orders = (found * size ** torch.arange(size)).sum(1).unique(return_counts=True)[1]
        assert len(orders) == math.factorial(size)
        yield p_value(orders, math.factorial(size) - 1)


def test_hashed_is_splitmix64() -> None:
    # The first terms that Vigna's splitmix64.c gives for the seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert hashed(1234567, torch.arange(1, 6)).tolist() == [signed(word) for word in known]


@given(st.lists(words64, min_size=1, max_size=20))
def test_int64_wraps_as_64_bit_words_do(words: list[int]) -> None:
    found = scramble(torch.tensor(words))
    assert found.tolist() == [signed(scrambled(word & keyed.WORD)) for word in words]
    assert shift(torch.tensor(words), 7).tolist() == [(word & keyed.WORD) >> 7 for word in words]
    assert all(signed(word & keyed.WORD) == word for word in words)


class TestKey:
    def test_depends_on_every_part_and_on_their_order(self) -> None:
        parts = [
            (seed, epoch, use) for seed in range(50) for epoch in range(50) for use in ("order", "augment", "dropout")
        ]
        assert len({key(*part) for part in parts}) == len(parts)
        assert key(7, 1) != key(8, 0) and key(1, 7) != key(7, 1) and key(1) != key(1, 0) != key(0, 1)

    @given(words64, words64)
    def test_is_an_int64(self, first: int, second: int) -> None:
        assert torch.tensor(key(first, second, "x")).dtype == torch.int64


class TestUniform:
    IDS = torch.arange(1 << 18)

    def draws(self, stream: int, epoch: int = 0) -> torch.Tensor:
        return uniform(hashed(key(3, epoch, "augment"), self.IDS), stream)

    def test_24_bits_from_0_up_to_but_not_1(self) -> None:
        found = self.draws(0)
        assert found.dtype == torch.float32
        assert found.min() >= 0 and found.max() < 1
        bits = (found.double() * 2**24).long()
        assert torch.equal(bits.double() * 2.0**-24, found.double())
        for bit in range(24):
            ones = int((bits >> bit & 1).sum())
            assert abs(ones - len(bits) / 2) < 5 * math.sqrt(len(bits)) / 2

    def test_a_place_among_n_is_never_n(self) -> None:
        largest = torch.tensor(1 - 2.0**-24)
        places = torch.arange(1, 1 << 20)
        assert bool(((largest * places).long() < places).all())

    @pytest.mark.parametrize("stream", range(14))
    def test_mean_and_distribution(self, stream: int) -> None:
        found = self.draws(stream).double()
        assert abs(found.mean() - 0.5) < 5 / math.sqrt(12 * len(found))
        assert kstest(found.numpy(), "uniform").pvalue > CHANCE

    def test_streams_epochs_and_neighbours_are_independent(self) -> None:
        first = self.draws(0)
        others = [self.draws(stream) for stream in range(1, 14)] + [self.draws(0, epoch) for epoch in range(1, 5)]
        others += [first.roll(1), first.roll(2), self.draws(1).roll(1)]
        for other in others:
            assert not torch.equal(first, other)
            pairs = torch.bincount((first * 16).long() * 16 + (other * 16).long(), minlength=256)
            assert p_value(pairs, 255) > CHANCE


class TestPermuted:
    @given(st.integers(1, 3000), st.integers(0, 2**32))
    def test_is_a_permutation_of_any_size(self, size: int, seed: int) -> None:
        found = permuted(torch.arange(size), size, key(seed))
        assert torch.equal(found.sort().values, torch.arange(size))

    @given(st.integers(1, 2000), st.data())
    def test_each_position_by_itself(self, size: int, data: st.DataObject) -> None:
        positions = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
        assert torch.equal(permuted(positions, size, 5), permuted(torch.arange(size), size, 5)[positions])
        assert torch.equal(permuted(positions[None], size, 5)[0], permuted(positions, size, 5))  # any shape

    @pytest.mark.parametrize("size", [10**9, 10**9 + 7, 2**40 - 1, 2**60])
    def test_huge_sizes_in_little_memory(self, size: int) -> None:
        class Largest(TorchDispatchMode):
            elements = operations = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                self.operations += 1
                if isinstance(result, torch.Tensor):
                    self.elements = max(self.elements, result.numel())
                return result

        generator = torch.Generator().manual_seed(0)
        anywhere = torch.randint(size, (1 << 16,), generator=generator)
        positions = torch.cat([torch.arange(1 << 15), size - 1 - torch.arange(1 << 15), anywhere]).unique()
        with Largest() as largest:
            found = permuted(positions, size, key(1, 0, "order"))
        assert largest.elements == len(positions)
        assert largest.operations < 1000
        assert found.min() >= 0 and found.max() < size
        assert len(found.unique()) == len(found)
        assert p_value(torch.bincount((found.double() / size * 64).long(), minlength=64), 63) > CHANCE

    @pytest.mark.parametrize(
        ("size", "epochs"),
        [(5, 800), *(pytest.param(n, 20_000, marks=pytest.mark.slow) for n in (2, 3, 5, 6, 8, 12, 31))],
    )
    def test_is_uniform_over_many_epochs(self, size: int, epochs: int) -> None:
        assert min(p_values_over_epochs(size, epochs)) > CHANCE

    @pytest.mark.parametrize("size", [97, 256, 1438, 60_000, 1_281_167])
    def test_neighbours_are_independent_in_one_epoch(self, size: int) -> None:
        for seed in range(10 if size < 10_000 else 1):
            found = permuted(torch.arange(min(size, 1 << 18)), size, key(seed, 0, "order"))
            fields = found * 12 // size
            pairs = torch.bincount(fields[:-1] * 12 + fields[1:], minlength=144)
            if size > 10_000:
                assert p_value(pairs, 143) > CHANCE
            steps = (found[1:] - found[:-1]) % size  # of a permutation by chance: any but 0
            assert steps.min() > 0
            assert p_value(torch.bincount((steps - 1) * 8 // (size - 1), minlength=8), 7) > CHANCE

    def test_seeds_and_epochs_have_nothing_in_common(self) -> None:
        size = 5000
        words = [key(7, 1, "order"), key(8, 0, "order"), key(7, 0, "order"), key(8, 1, "order"), key(1, 7, "order")]
        orders = [permuted(torch.arange(size), size, word) for word in words]
        for number, order in enumerate(orders):
            for other in orders[:number]:
                assert int((order == other).sum()) < 12  # chance alone: 1 on average, of Poisson's distribution
                assert p_value(torch.bincount((order - other) % size * 8 // size, minlength=8), 7) > CHANCE
