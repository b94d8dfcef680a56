"""A user's Dataset on its way to data workers: with few file descriptors, however many tensors it keeps.

torch sends the memory of each tensor by a file descriptor of its own, and a worker can be sent some 250. Here all
small tensors lie in one block of shared memory. Large ones are shared as they are, without a copy.

The user's tensors become views of that block, so that their bytes are in memory only once. (torch moves a tensor that
it sends, too.)
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from accel_train.data.compat import ForkingPickler
from accel_train.launch.compat import DisableTorchFunctionSubclass

LARGE = 2**24  # bytes of a tensor's memory that is shared as it is,
MOST_LARGE = 32  # of at most so many tensors
ALIGNMENT = 64  # bytes, a multiple of the size of every dtype's element

Place = tuple[int, int]
"""Of a storage: the number of the shared tensor in which it lies, and the first byte there."""


class Packed:
    """An object, pickled, beside the shared memory in which its tensors lie. May itself be sent to any number of
    workers."""

    def __init__(self, value: Any) -> None:
        """Raises what pickling `value` raises."""
        stream = BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(value)
        self.pickled = stream.getvalue()
        block = torch.empty(max(1, pickler.block_bytes), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        for first, storage in pickler.small:
            block[first : first + storage.nbytes()] = _bytes_of(storage)
        self.memory = [block, *map(_bytes_of, pickler.large)]
        for tensor in pickler.tensors:
            _move(tensor, block, *pickler.places[tensor.as_subclass(Tensor).untyped_storage()._cdata])
        del pickler  # which holds the tensors' old memory
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc would keep it; other C libraries do not have this function

    def unpack(self) -> Any:
        """The object; its tensors are views of the shared memory."""
        return _Unpickler(BytesIO(self.pickled), self.memory).load()


class _Pickler(ForkingPickler):
    def __init__(self, stream: BytesIO) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.small: list[tuple[int, torch.UntypedStorage]] = []  # with their first bytes in the block
        self.large: list[torch.UntypedStorage] = []
        self.block_bytes = 0
        self.tensors: list[Tensor] = []
        self.places: dict[int, Place] = {}  # by the address of a storage, which `small` and `large` keep alive

    def persistent_id(self, value: Any) -> Any:
        """The memory of a tensor: its place, in place of its bytes."""
        return self._place(value) if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" else None

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is rebuilt from its memory. One that is not plain numbers in memory is pickled by value."""
        if isinstance(value, torch.storage.TypedStorage):
            return value.__reduce__()  # type: ignore[no-untyped-call]
        if not isinstance(value, Tensor):
            return NotImplemented
        plain = value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized
        if not plain or value.requires_grad or value.is_conj() or value.is_neg():
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        self.tensors.append(value)
        base = value.as_subclass(Tensor)
        view = base.dtype, base.storage_offset(), tuple(base.shape), base.stride()
        arguments = (type(value), base.untyped_storage(), *view)
        return (_rebuild, arguments, value.__dict__) if value.__dict__ else (_rebuild, arguments)

    def _place(self, storage: torch.UntypedStorage) -> Place:
        address, size = storage._cdata, storage.nbytes()
        if address not in self.places:
            if size >= LARGE and len(self.large) < MOST_LARGE:
                self.large.append(storage)
                self.places[address] = (len(self.large), 0)
            else:
                self.small.append((self.block_bytes, storage))
                self.places[address] = (0, self.block_bytes)
                self.block_bytes += -(-size // ALIGNMENT) * ALIGNMENT
        return self.places[address]


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: BytesIO, memory: list[Tensor]) -> None:
        super().__init__(stream)
        self.memory = [tensor.untyped_storage() for tensor in memory]

    def persistent_load(self, place: Place) -> tuple[torch.UntypedStorage, int]:
        number, first = place
        return self.memory[number], first


def _move(tensor: Tensor, block: Tensor, number: int, first: int) -> None:
    """Make a tensor, whose bytes are in the block from `first` on, a view of the block."""
    # torch refuses to move what detach() returned, and tensors of inference mode: they stay where they are.
    with DisableTorchFunctionSubclass(), contextlib.suppress(RuntimeError):
        if number == 0:
            offset = first // tensor.element_size() + tensor.storage_offset()
            tensor.set_(block.untyped_storage(), offset, tensor.shape, tensor.stride())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _rebuild(
    kind: type[Tensor],
    memory: tuple[torch.UntypedStorage, int],
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """A tensor of the class `kind`, `offset` elements behind the beginning of its memory."""
    storage, first = memory
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(storage, first // tensor.element_size() + offset, shape, stride)
    return tensor if kind is Tensor else tensor.as_subclass(kind)
