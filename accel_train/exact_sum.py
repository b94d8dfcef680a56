"""Sums of floats whose bits do not depend on the order of the values, or on which process has which of them.

A float sum depends on its order, because each addition rounds. Here each value is rounded once, before it is added, to
a multiple of one power of two, the unit of a grid. Sums of such multiples are exact in float64, so they have no order:
any number of processes, any accumulation and any algorithm of all-reduce give the same bits.

The unit is 2^(e - bits). All values are smaller than 2^e, where e is the exponent of the largest of them on all
processes; a maximum has no order either. So that n terms fit into float64's 53 bits, bits = 53 - log2 n: 46 for 128
terms. The sum differs from the true one by at most n/2 units: with 128 terms by 2^-39 of the largest value. That is an
absolute error, the same for all elements of a tensor. With 46 bits only values below 2^-22 of the largest are rounded
at all (a float32 value has 24 bits), so a sum of larger ones is more precise than in float32. But a sum of values that
are all far smaller is less precise, and what is below half a unit counts as zero.

Rounding to a common grid before a sum is the method of Demmel and Nguyen, "Fast Reproducible Floating-Point
Summation", IEEE ARITH 2013. With two or more fixed grids and a sum for each, the largest value need not be known in
advance (Ahrens, Demmel and Nguyen, "Algorithms for Efficient Reproducible Floating Point Summation", ACM TOMS 46(3),
2020). For gradients that takes 16 bytes of memory a parameter, however many virtual batches there are, but also 16
bytes instead of 8 in each all-reduce, and more than twice the time. Integers would give the same sums as a grid, but
convert more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accel_train.errors import UserError

NOT_FINITE = 2047 - (1023 - 127)
"""What `exponents_of` says of infinity and NaN."""
LEAST_BITS = 24  # of a float32 value: with fewer, the largest values themselves would be rounded
BUCKET = 1 << 20  # elements of float64 that are summed over all processes at once: 8 MiB, which a CPU's cache holds
# So many values are rounded at once: on a CPU 2 MiB as float64 for each thread, which its cache holds; on a GPU many,
# because each launch of a kernel costs time, but not more than 128 MiB.
VALUES_CPU, VALUES_GPU = 1 << 18, 1 << 24
SMALLEST_PIECE = 1 << 12  # elements: for fewer, calling the operators takes longer than their work


class ExactGradients:
    """Sums the gradients of an update's virtual batches, on all processes, to the same bits however they are divided.

    Call `add` after each backward pass, then `finish` once, and set the gradients to None before the next update, as
    `zero_grad` does. This keeps the gradients of all virtual batches of a process, because their grid is known only
    after the last one, and the sum: of float32 parameters 4 bytes an element each. Sparse gradients become dense.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], virtual_batches: int) -> None:
        """`parameters`: all on one device; of a DDP model, not of FSDP2. The same order on all processes.

        `virtual_batches`: at most so many in one update, over all processes. It decides the grid, so it must be the
        same on any number of processes. Raises UserError if they are too many, if the device has no float64, or if a
        parameter is complex.
        """
        self._parameters = [parameter for parameter in parameters if parameter.numel()]
        if any(parameter.is_complex() for parameter in self._parameters):
            raise UserError(
                "Gradients of complex parameters have no exact sum. Keep their real and imaginary parts instead."
            )
        self._virtual_batches, self._bits = virtual_batches, grid_bits(virtual_batches)
        for device in {parameter.device for parameter in self._parameters}:
            check_device(device)
        # The same memory in each update: on a CPU, new memory would take a third of the time of the sums. Not the
        # memory of a kept gradient, because autograd can give two parameters gradients that share it.
        self._results = [torch.empty_like(parameter).detach() for parameter in self._parameters]
        # For each virtual batch, and each parameter, its gradient's elements in the order of the parameter's memory.
        self._rows: list[list[Tensor | None]] = []

    def add(self) -> None:
        """Take the gradients of one virtual batch: each `.grad` becomes None. Nothing is copied, nothing is sent.

        A gradient may be None. DDP must not have reduced the gradients: use its `no_sync`.
        """
        if len(self._rows) == self._virtual_batches:
            raise RuntimeError(f"more than {self._virtual_batches} virtual batches in one update: the sum is not exact")
        row: list[Tensor | None] = []
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            row.append(None if gradient is None else _in_memory_order(gradient, parameter))
        self._rows.append(row)

    @torch.no_grad()
    def finish(self, divisor: int) -> None:
        """Set each `.grad` to the sum of all gradients since the last call, over all processes, divided by `divisor`.

        Collective; a process may have added nothing. The sum is exact on the grid; it is divided in float64, and the
        quotient is rounded to the type of the parameter. A parameter without any gradient keeps None. If a gradient has
        a NaN or an infinite value, the sum of this tensor is NaN in all elements, on all processes.
        """
        if not self._parameters:
            return
        exponents = _all_reduce(self._largest_exponents(), dist.ReduceOp.MAX)
        constants = rounding_constants(exponents, self._bits)
        columns = [[row[index] for row in self._rows] for index in range(len(self._parameters))]
        gradients = [[gradient for gradient in column if gradient is not None] for column in columns]
        flat_results = [_in_memory_order(*pair) for pair in zip(self._results, self._parameters, strict=True)]
        # A tensor, because on CUDA torch would multiply by the reciprocal of a Python number.
        count = torch.full((), divisor, dtype=torch.float64, device=constants.device)
        buffer = torch.empty(BUCKET, dtype=torch.float64, device=constants.device)
        for bucket in self._buckets():
            sizes = [part.stop - part.start for _, part in bucket]
            total = buffer[: sum(sizes)]
            for (index, part), out in zip(bucket, total.split_with_sizes(sizes), strict=True):
                _sum_on_grid([gradient[part] for gradient in gradients[index]], constants[index], out)
            _all_reduce(total, dist.ReduceOp.SUM).div_(count)
            for (index, part), quotient in zip(bucket, total.split_with_sizes(sizes), strict=True):
                flat_results[index][part].copy_(quotient)
        self._rows = []
        # Reading the exponents waits for the device: only if this process has no gradient of some parameter.
        present = [True] * len(gradients) if all(gradients) else (exponents >= 0).tolist()
        for parameter, result, has_gradient in zip(self._parameters, self._results, present, strict=True):
            parameter.grad = result if has_gradient else None

    def _largest_exponents(self) -> Tensor:
        """`exponents_of` the largest gradient of each parameter on this process; int32 [parameters]."""
        absent = torch.full((), -1.0, dtype=torch.float64, device=self._parameters[0].device)
        if not self._rows:
            return exponents_of(absent.expand(len(self._parameters)))
        found = iter(_largest([gradient for row in self._rows for gradient in row if gradient is not None]))
        largest = [absent if gradient is None else next(found) for row in self._rows for gradient in row]
        return exponents_of(torch.stack(largest).view(len(self._rows), -1).amax(0))

    def _buckets(self) -> Iterator[list[tuple[int, slice]]]:
        """Cut all parameters, one after the other, into buckets: the numbers of parameters and which elements."""
        bucket: list[tuple[int, slice]] = []
        room = BUCKET
        for index, parameter in enumerate(self._parameters):
            start = 0
            while start < parameter.numel():
                stop = min(parameter.numel(), start + room)
                bucket.append((index, slice(start, stop)))
                room -= stop - start
                start = stop
                if not room:
                    yield bucket
                    bucket, room = [], BUCKET
        if bucket:
            yield bucket


@torch.no_grad()
def exact_sum(rows: Tensor, terms: int) -> Tensor:
    """The sum of each column of `rows` [n, k] over all processes; float64 [k] on the same device. Collective.

    As `ExactGradients` does it, but each column has a grid of its own. `terms`: all processes together have at most so
    many rows, and it decides the grid; a process may have none. For statistics of BatchNorm a row is a virtual batch.
    """
    check_device(rows.device)
    if not len(rows):
        rows = rows.new_zeros(1, rows.shape[1])
    exponents = _all_reduce(exponents_of(rows.abs().amax(0)), dist.ReduceOp.MAX)
    return _all_reduce(round_to_grid(rows, rounding_constants(exponents, grid_bits(terms))).sum(0), dist.ReduceOp.SUM)


def grid_bits(terms: int) -> int:
    """How many bits the largest of `terms` values keeps, so that float64's 53 bits hold their sum; 24 to 51.

    Raises UserError if that leaves less than a float32 value has. (With more than 51, `round_to_grid` would not work.)
    """
    bits = min(51, 53 - (terms - 1).bit_length())
    if bits < LEAST_BITS:
        most = 1 << (53 - LEAST_BITS)
        raise UserError(f"An exact sum can have at most {most} terms, and this one has {terms}: use a smaller batch.")
    return bits


def check_device(device: torch.device) -> None:
    """Raises UserError if `device` cannot compute with float64."""
    if device.type == "mps":
        raise UserError("Exact sums need float64, which the device mps does not have. Train on a CPU or a CUDA GPU.")


def exponents_of(largest: Tensor) -> Tensor:
    """The exponents of the largest absolute values, floats of any shape and type; int32 of this shape, from 0 on.

    They count as float32's exponent bits do: 0 for all that is below 2^-126; a float64 can have more than 254.
    `NOT_FINITE` for infinity and NaN: as integers, no maximum can lose a NaN. -1 for -1, which says that there is no
    value.
    """
    exponents = (largest.double().abs().view(torch.int64) >> 52) - (1023 - 127)
    return exponents.clamp_(min=0).int().masked_fill_(largest < 0, -1)


def rounding_constants(exponents: Tensor, bits: int) -> Tensor:
    """What `round_to_grid` adds, float64, for values whose largest has these exponents (int32, `exponents_of`).

    The values are smaller than 2^e with e = exponent - 126, the unit is 2^(e - bits), and the constant is 1.5 * 2^52
    units; NaN if a value is infinite or NaN, or a float64 so large that its sum could be infinite. An exponent of -1
    (no values) counts as 0.
    """
    # Set the bits of the constant instead of computing a power, which not every device computes exactly. For float32
    # its exponent is between -125 and 156, far from the ends of float64.
    power = exponents.clamp(min=0, max=NOT_FINITE).long() - 126 + 52 - bits
    constants = (((power.clamp(max=1022) + 1023) << 52) | (1 << 51)).view(torch.float64)
    return constants.masked_fill_((exponents >= NOT_FINITE) | (power > 1022), torch.nan)


def round_to_grid(values: Tensor, constants: Tensor) -> Tensor:
    """Round `values` to multiples of the grid's unit, half to even; float64 of the same shape.

    Between 2^52 and 2^53 units, where the constant is, float64 has no fractions of a unit: adding the constant rounds,
    and subtracting it is exact. `constants`: of `rounding_constants`, broadcast to the values.
    """
    return values.double().add_(constants).sub_(constants)


def _sum_on_grid(rows: Sequence[Tensor], constant: Tensor, out: Tensor) -> None:
    """Write the sum of `rows`, each [k] and rounded to the grid, to `out`, float64 [k]; 0 without rows."""
    if not rows:
        out.zero_()
        return
    values = VALUES_CPU * torch.get_num_threads() if out.device.type == "cpu" else VALUES_GPU
    length = max(SMALLEST_PIECE, values // len(rows))
    for piece, *pieces in zip(*(torch.split(each, length) for each in (out, *rows)), strict=True):
        torch.sum(round_to_grid(torch.stack(pieces), constant), 0, out=piece)


def _largest(tensors: list[Tensor]) -> Sequence[Tensor]:
    """The largest absolute value of each of the tensors, NaN if it has a NaN; a float [] each."""
    if tensors and tensors[0].device.type == "cpu":  # some 15 times as fast as the norm
        smallest, largest = zip(*(torch.aminmax(tensor) for tensor in tensors), strict=True)
        return torch.maximum(torch.stack(largest), -torch.stack(smallest)).unbind()  # of the widest type
    return torch._foreach_norm(tensors, torch.inf) if tensors else ()  # few launches for all tensors


def _in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The elements of `gradient`, [n], in the order in which `empty_like(parameter)` has them in memory.

    A view if autograd has given the gradient this layout, as it does; otherwise a copy, as of a sparse one.
    """
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    layout = torch.empty_like(parameter, device="meta")
    steps = zip(gradient.shape, gradient.stride(), layout.stride(), strict=True)
    if any(size > 1 and step != expected for size, step, expected in steps):
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    """Replace `values` by the sum or maximum over all processes, and return them."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, operation)
    return values
