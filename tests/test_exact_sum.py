"""exact_sum.py: sums whose bits do not depend on order or division, compared with sums of fractions.

Real processes: tests/integration/test_bitwise.py.
"""

from __future__ import annotations

import math
import threading
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from accel_train import exact_sum as module
from accel_train.errors import UserError
from accel_train.exact_sum import (
    ExactGradients,
    exact_sum,
    exponents_of,
    grid_bits,
    round_to_grid,
    rounding_constants,
)

LARGEST, SMALLEST = (2 - 2.0**-23) * 2.0**127, 2.0**-149  # of float32
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALL = st.floats(-(2.0**-120), 2.0**-120, width=32)  # with denormals
LIKE_GRADIENTS = st.floats(-1, 1, width=32)
VALUES = st.one_of(*(st.lists(values, min_size=1, max_size=20) for values in (FLOATS, SMALL, LIKE_GRADIENTS)))


def sum_of_parts(parts: list[Tensor], terms: int) -> Tensor:
    """What processes with these rows (float32 [n, k]) compute and reduce, in the order of the list; float64 [k]."""
    parts = [part if len(part) else part.new_zeros(1, part.shape[1]) for part in parts]
    exponents = torch.stack([exponents_of(part.abs().amax(0)) for part in parts]).amax(0)
    constants = rounding_constants(exponents, grid_bits(terms))
    total = torch.zeros(parts[0].shape[1], dtype=torch.float64)
    for part in parts:
        total = total + round_to_grid(part, constants).sum(0)
    return total


def unit(values: list[float], terms: int) -> Fraction:
    """The grid's unit: all values are smaller than 2^e."""
    e = max(-126, math.frexp(max(map(abs, values)))[1])
    return Fraction(2) ** (e - grid_bits(terms))


def sum_of_rounded(values: list[float], terms: int) -> Fraction:
    step = unit(values, terms)
    return sum((round(Fraction(value) / step) for value in values), 0) * step  # `round` is half to even


def bits(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


class TestArithmetic:
    @given(VALUES, st.integers(0, 29), st.data())
    def test_any_order_and_any_division_give_the_exact_sum_of_the_rounded_values(
        self, values: list[float], power: int, data: st.DataObject
    ) -> None:
        terms = max(2**power, len(values))
        expected = sum_of_rounded(values, terms)
        assert abs(expected - sum(map(Fraction, values))) <= len(values) * unit(values, terms) / 2
        cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
        shuffled = torch.tensor(data.draw(st.permutations(values)), dtype=torch.float32)[:, None]
        parts = [shuffled[start:stop] for start, stop in pairwise([0, *cuts, len(values)])]
        whole = exact_sum(torch.tensor(values, dtype=torch.float32)[:, None], terms)
        assert Fraction(whole.item()) == expected
        assert bits(sum_of_parts(parts, terms)) == bits(whole)

    @pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 128, 1000])
    @pytest.mark.parametrize("value", [LARGEST, 2.0**127, 1.0, 1 - 2.0**-24, 2.0**-126, SMALLEST])
    def test_as_many_values_as_it_promises_room_for(self, terms: int, value: float) -> None:
        for sign in (1, -1):
            rows = torch.full((terms, 1), sign * value)
            assert Fraction(exact_sum(rows, terms).item()) == terms * Fraction(sign * value)

    def test_each_column_has_its_own_grid(self) -> None:
        assert exact_sum(torch.tensor([[1e30, 1e-30], [1e30, 1e-30]]), 2).tolist() == pytest.approx([2e30, 2e-30])

    def test_without_rows_it_is_zero(self) -> None:
        assert exact_sum(torch.empty(0, 3), 8).tolist() == [0, 0, 0]

    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_makes_its_column_nan_in_all_processes(self, bad: float) -> None:
        finite, other = torch.ones(2, 3), torch.tensor([[1.0, bad, 1.0]])
        for parts in ([finite, other], [other, finite]):
            assert torch.equal(sum_of_parts(parts, 8).isnan(), torch.tensor([False, True, False]))

    @pytest.mark.parametrize("scale", [1.0, 1e-200, 1e250])
    def test_float64_has_no_order_either(self, scale: float) -> None:
        rows = torch.randn(64, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scale
        total = exact_sum(rows, 64)
        assert bits(total) == bits(exact_sum(rows.flip(0), 64)) == bits(sum_of_parts(list(rows.split(7)), 64))
        torch.testing.assert_close(total, rows.sum(0), rtol=1e-11, atol=2.0**-160)

    def test_a_float64_whose_sum_could_be_infinite_is_nan(self) -> None:
        assert exact_sum(torch.tensor([[1e308], [1e308]], dtype=torch.float64), 2).isnan().all()


def parameters() -> list[nn.Parameter]:
    """Of several layouts: contiguous, channels last, and one that is not dense, where autograd gives a dense one."""
    weight = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [nn.Parameter(each) for each in (torch.zeros(300, 7), weight, torch.zeros(5), torch.zeros(4, 6)[:, ::2])]


def gradients_of(shapes: list[nn.Parameter], count: int) -> list[list[Tensor]]:
    """So many virtual batches; each gradient has the layout that autograd gives it."""
    numbers = torch.Generator().manual_seed(count)
    return [
        [torch.empty_like(p).detach().copy_(torch.randn(p.shape, generator=numbers) * 10.0 ** -(b % 7)) for p in shapes]
        for b in range(count)
    ]


def summed(rows: list[list[Tensor | None]], divisor: int, virtual_batches: int = 16) -> list[nn.Parameter]:
    weights = parameters()
    exact = ExactGradients(weights, virtual_batches)
    for row in rows:
        for weight, gradient in zip(weights, row, strict=True):
            weight.grad = gradient
        exact.add()
        assert all(weight.grad is None for weight in weights)
    exact.finish(divisor)
    return weights


class TestGradients:
    def test_the_sum_is_divided_and_rounded(self) -> None:
        rows = gradients_of(parameters(), 11)
        for index, weight in enumerate(summed([*rows], 3)):
            columns = torch.stack([row[index].flatten() for row in rows])
            largest = columns.abs().max().item()
            assert weight.grad is not None and weight.grad.shape == weight.shape
            for values, quotient in zip(columns.T.tolist(), weight.grad.flatten().tolist(), strict=True):
                step = unit([largest], 16)
                total = float(sum(round(Fraction(value) / step) for value in values) * step)
                assert quotient == torch.tensor(total / 3, dtype=torch.float64).float().item()

    def test_the_order_and_the_sizes_of_buckets_and_pieces_change_no_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = gradients_of(parameters(), 11)
        expected = [bits(weight.grad) for weight in summed([*rows], 64)]
        for bucket, piece in ((1000, 10), (7, 10), (1 << 20, 3)):
            monkeypatch.setattr(module, "BUCKET", bucket)
            monkeypatch.setattr(module, "VALUES_CPU", 1)
            monkeypatch.setattr(module, "SMALLEST_PIECE", piece)
            assert [bits(weight.grad) for weight in summed(rows[::-1], 64)] == expected

    def test_gradients_have_the_layout_of_their_parameters(self) -> None:
        weights = summed([*gradients_of(parameters(), 2)], 1)
        assert [weight.grad.stride() for weight in weights[:3]] == [weight.stride() for weight in weights[:3]]
        assert weights[3].grad.is_contiguous()
        other = [[gradient.contiguous() for gradient in row] for row in gradients_of(parameters(), 2)]
        for weight, expected in zip(summed([*other], 1), weights, strict=True):
            assert torch.equal(weight.grad, expected.grad) and weight.grad.stride() == expected.grad.stride()

    def test_missing_gradients_count_as_zero_and_stay_none_if_all_are(self) -> None:
        rows = gradients_of(parameters(), 3)
        weights = summed([[rows[0][0], None, None, None], [rows[1][0], rows[1][1], None, rows[1][3]]], 1)
        alone = summed([[None, rows[1][1], None, rows[1][3]]], 1)
        assert weights[2].grad is None and alone[0].grad is None
        assert torch.equal(weights[1].grad, alone[1].grad) and torch.equal(weights[3].grad, alone[3].grad)
        assert [weight.grad for weight in summed([], 1)] == [None] * 4

    def test_two_processes_round_to_one_grid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads take the place of processes. Alone, the first one's small gradients would have a finer grid; the
        large ones of the second one cancel."""
        rows = gradients_of(parameters(), 2)
        parts = rows, [[gradient * factor for gradient in rows[0]] for factor in (1e9, -1e9)]
        expected = [bits(weight.grad) for weight in summed([*parts[0], *parts[1]], 3)]
        here, gate = {}, threading.Barrier(2, timeout=20)

        def all_reduce(values: Tensor, operation: object) -> Tensor:
            here[threading.current_thread().name] = values.clone()
            gate.wait()
            both = torch.stack([here["0"], here["1"]])
            gate.wait()
            return values.copy_(both.sum(0) if operation == dist.ReduceOp.SUM else both.amax(0))

        monkeypatch.setattr(module, "_all_reduce", all_reduce)
        found: dict[str, list[bytes]] = {}

        def process(number: int) -> None:
            found[str(number)] = [bits(weight.grad) for weight in summed([*parts[number]], 3)]

        threads = [threading.Thread(target=process, args=(number,), name=str(number)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {"0": expected, "1": expected}

    def test_two_gradients_in_the_same_memory(self) -> None:
        """Autograd can give them: then the sum of one may not overwrite the other."""
        weights = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2))]
        exact = ExactGradients(weights, 4)
        for _ in range(3):
            ((weights[0].view(4) + weights[1].view(4)) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
            assert weights[0].grad.data_ptr() == weights[1].grad.data_ptr()
            exact.add()
        exact.finish(3)
        assert weights[0].grad.tolist() == weights[1].grad.tolist() == [[1.0, 2.0], [3.0, 4.0]]

    def test_parameters_of_several_types(self) -> None:
        """Each sum has its parameter's type, and the bits that this parameter alone would have."""
        types = (torch.float64, torch.float32, torch.bfloat16)
        weights = [nn.Parameter(torch.zeros(30, 5, dtype=dtype)) for dtype in types]
        gradients = [gradient_of.to(weight) for weight in weights for gradient_of in torch.randn(4, 30, 5).unbind()]
        together = ExactGradients(weights, 4)
        alone = [ExactGradients([nn.Parameter(torch.zeros(30, 5, dtype=dtype))], 4) for dtype in types]
        for number in (3, 1, 0, 2):
            for index, weight in enumerate(weights):
                weight.grad = gradients[4 * index + number].clone()
                if number or index:  # a process may have no gradient of some
                    alone[index]._parameters[0].grad = weight.grad.clone()
                else:
                    weight.grad = None
                alone[index].add()
            together.add()
        together.finish(3)
        for weight, single in zip(weights, alone, strict=True):
            single.finish(3)
            assert weight.grad is not None and weight.grad.dtype == weight.dtype
            assert torch.equal(weight.grad, single._parameters[0].grad)
        expected = torch.stack(gradients[4:8]).double().sum(0).div(3).float()
        assert torch.equal(weights[1].grad, expected)

    def test_sparse_gradients_become_dense(self) -> None:
        sums = []
        for sparse in (False, True):
            weight = nn.Parameter(torch.zeros(9, 2))
            exact = ExactGradients([weight], 2)
            for words in (torch.tensor([1, 4, 1]), torch.tensor([4, 8, 0])):
                F.embedding(words, weight, sparse=sparse).mul(torch.tensor([1.0, 0.1])).sum().backward()
                assert weight.grad is not None and weight.grad.is_sparse == sparse
                exact.add()
            exact.finish(1)
            sums.append(weight.grad)
        assert sums[1].layout == torch.strided and torch.equal(*sums)

    def test_complex_parameters_are_refused(self) -> None:
        with pytest.raises(UserError, match="complex parameters"):
            ExactGradients([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 2)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_makes_its_whole_tensor_nan(self, bad: float) -> None:
        rows = gradients_of(parameters(), 4)
        rows[2][1][0, 0, 0, 0] = bad
        weights = summed([*rows], 4)
        assert [bool(weight.grad.isfinite().all()) for weight in weights] == [True, False, True, True]
        assert weights[1].grad.isnan().all()

    def test_more_virtual_batches_than_it_was_made_for_are_refused(self) -> None:
        with pytest.raises(RuntimeError, match="more than 2 virtual batches"):
            summed([*gradients_of(parameters(), 3)], 1, virtual_batches=2)
        with pytest.raises(UserError, match="use a smaller batch"):
            ExactGradients(parameters(), 2**29 + 1)

    def test_empty_parameters_and_none_at_all(self) -> None:
        empty = nn.Parameter(torch.empty(0, 3))
        for weights in ([empty], []):
            exact = ExactGradients(weights, 2)
            exact.add()
            exact.finish(1)
        assert empty.grad is None
