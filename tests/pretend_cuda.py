"""A pretended CUDA device: tensors that say they are on cuda:0, compute on the CPU, and fail where a GPU's would.

`python tests/pretend_cuda.py` reads command lines of accel-train, carries them out on it and answers what became of
each; `Pretended` below talks to it. It has nothing of a GPU's speed and memory, nor NCCL, but

* a CPU tensor that meets one on the device is an error; so is to pin one that is there, or to read it with numpy;
* memory that nobody has written to is garbage, and so is what is copied to the host without blocking, until somebody
  has waited for it;
* so is what is copied to the device on a side stream, until another stream is told to wait for that one;
* each wait of the host for the device is counted, with the line that waits; so is each kernel that would be started;
* foreach and fused kernels are chosen as for CUDA. Autocast is the CPU's, and fp16 has its loss scaler.

It reaches into torch's internals, as its FakeTensor does: tests only.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
FREE_BYTES = "PRETENDED_FREE_BYTES"
"""The variable with the free memory of the device; default: 8 GiB."""
PROGRAM = str(Path(__file__).parent.parent / "accel_train") + os.sep

# Operations whose result has a size that only the device knows, or which is a number of Python's: the host waits.
WAITING = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount", "histc", "repeat_interleave",
}  # fmt: skip
# Those that start no kernel.
FREE = {
    "view", "_unsafe_view", "_reshape_alias", "as_strided", "permute", "transpose", "t", "expand", "slice", "select",
    "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind", "diagonal", "detach", "alias", "lift_fresh",
    "unfold", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_",
}  # fmt: skip


# Those that raise on CUDA with torch.use_deterministic_algorithms(True), as its documentation lists them.
NONDETERMINISTIC = {
    "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "avg_pool3d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d",
    "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward", "upsample_trilinear3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "nll_loss2d_forward",
    "_ctc_loss_backward", "histc", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
}  # fmt: skip


# What was done since the last update's end, by the lines of accel_train that it came from.
waits: collections.Counter[str] = collections.Counter()
kernels: collections.Counter[str] = collections.Counter()


def place() -> str:
    """The innermost line of accel_train that is being executed: "meter.py:read"."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PROGRAM):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"  # autograd's own thread of control, or a library at its start


# --- Time on the device: what it has been told to do and the host has not yet waited for.

_clock = 0
_pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # when, where to, what


def wait(kind: str, until: int | None = None) -> None:
    """Let the host wait for the device, which finishes all work queued `until` then."""
    waits[f"{place()} {kind}"] += 1
    arrive(until)


def arrive(until: int | None = None) -> None:
    with _quietly():
        while _pending and (until is None or _pending[0][0] <= until):
            _, target, values = _pending.pop(0)
            target.copy_(values)


def send_later(target: torch.Tensor, values: torch.Tensor) -> None:
    """The copy to pinned memory that nobody has waited for yet: until then garbage is there."""
    global _clock
    _clock += 1
    with _quietly():
        _pending.append((_clock, target, values.clone()))
        spoil(target)


def spoil(tensor: torch.Tensor) -> None:
    """Memory that nothing has been written to."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = _clock

    def record(self, *_: Any) -> None:
        self.at = _clock

    def synchronize(self) -> None:
        wait("event.synchronize", self.at)

    def query(self) -> bool:
        return not (_pending and _pending[0][0] <= self.at)

    def wait(self, *_: Any) -> None:
        pass


class Generator(torch.Generator):
    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


class Stream:
    """What is copied to the device on another stream than the default one is garbage to all others, until they have
    been told to wait for it. Kernels are not delayed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # where to, what

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_stream(self, other: Stream) -> None:
        orders.append(f"{self.name} waits for {other.name}")
        other.finish()

    def wait_event(self, _: Event) -> None:
        pass

    def synchronize(self) -> None:
        wait("stream.synchronize")
        self.finish()

    def is_capturing(self) -> bool:
        return False

    def finish(self) -> None:
        with _quietly():
            for target, values in self.copies:
                target.copy_(values)
        self.copies.clear()

    @property
    def name(self) -> str:
        return "default" if self is _default else "side"


_default = Stream()
_current = _default
orders: list[str] = []
"""Waits of streams for others, and memory that is said to be used on one, in their order."""


@contextlib.contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    global _current
    before, _current = _current, stream
    try:
        yield
    finally:
        _current = before


def record_stream(_: torch.Tensor, stream: Stream) -> None:
    orders.append(f"memory used on {stream.name}")


# --- Pinned memory.

_pinned: dict[int, StorageWeakRef] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    for key in [key for key, reference in _pinned.items() if reference.expired()]:
        del _pinned[key]
    reference = StorageWeakRef(tensor.untyped_storage())  # a weak one keeps its address from being used again
    _pinned[reference.cdata] = reference
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


# --- Tensors.


_living: dict[int, tuple[StorageWeakRef, int]] = {}  # the memory of tensors: address -> (it, bytes)


def take_memory(held: torch.Tensor) -> None:
    """Raise the device's error if all living tensors need more than the bytes in PRETENDED_MEMORY."""
    if "PRETENDED_MEMORY" not in os.environ:
        return
    storage = held.untyped_storage()
    for address in [address for address, (memory, _) in _living.items() if memory.expired()]:
        del _living[address]
    if storage._cdata not in _living:
        used = sum(size for _, size in _living.values())
        if used + storage.nbytes() > int(os.environ["PRETENDED_MEMORY"]):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
        _living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0, whose values are in the CPU tensor `held`.

    To torch's C++ it is one on the CPU, without memory: its autograd engine asks the driver about those of CUDA. To
    everything that is written in Python it is on cuda:0.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> CudaTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=CPU,
        )
        made.held = held
        take_memory(held)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        return dispatch(operation, arguments, options or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made = self.detach().clone()
            memo[id(self)] = torch.nn.Parameter(made) if isinstance(self, torch.nn.Parameter) else made
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, other: CudaTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # sizes, strides, dtype
        self.held = other.held

    # What torch's C++ does by itself for a tensor on the CPU.

    def to(self, *arguments: Any, **options: Any) -> torch.Tensor:  # type: ignore[override]
        if arguments and isinstance(arguments[0], torch.Tensor):
            arguments = (arguments[0].device, arguments[0].dtype, *arguments[1:])
        copies = options.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*arguments, **options)  # type: ignore[attr-defined]
        kinds = {"dtype": dtype, "memory_format": layout, "copy": copies}
        moved = self if device is None or device.type == "cuda" else _to_host(self, non_blocking=non_blocking)
        kinds = {key: value for key, value in kinds.items() if value is not None}
        return torch.Tensor.to(moved, **kinds) if kinds else moved

    def cpu(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return _to_host(self)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:  # type: ignore[override]
        return self

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy  # type: ignore[assignment]

    def pin_memory(self, *_: Any) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError(f"cannot pin 'torch.cuda' tensor of {self.dtype}: only dense CPU tensors can be pinned")

    def is_pinned(self, *_: Any) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:
        wait("tolist")
        return self.held.tolist()


def _to_host(tensor: CudaTensor, *, non_blocking: bool = False) -> torch.Tensor:
    with _quietly():
        made = tensor.held.detach().clone()
    if non_blocking:
        send_later(pin(made), made)
    else:
        wait("copy to the host")
    return made


class PretendedCuda(TorchDispatchMode):
    """Sees what is made on the device from nothing, and what is pinned; all else comes to the tensors themselves."""

    def __torch_dispatch__(self, operation: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
        return dispatch(operation, arguments, options or {})


def _quietly() -> Any:
    return torch._C._DisableTorchDispatch()  # type: ignore[attr-defined]


def dispatch(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    name = operation._schema.name.partition("::")[2]
    tensors = [each for each in tree_flatten((arguments, options))[0] if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, CudaTensor)]
    wanted = options.get("device")
    wanted = None if wanted is None else torch.device(wanted)
    if not there and (wanted is None or wanted.type != "cuda"):
        return _on_host(name, operation, arguments, options)
    if name == "is_pinned":
        return False
    if name in ("pin_memory", "_pin_memory"):
        raise RuntimeError(f"cannot pin 'torch.cuda.{arguments[0].dtype}' only dense CPU tensors can be pinned")
    if name == "_to_copy" and not there:
        return _to_device(arguments[0], options)
    if name == "copy_":
        return _copied(*arguments[:2], blocks=not (arguments[2] if len(arguments) > 2 else options.get("non_blocking")))
    if name in WAITING:
        wait(name)
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        for each in arguments[1]:
            if each is not None and (each.dtype in (torch.bool, torch.uint8) or not isinstance(each, CudaTensor)):
                wait(f"{name} by {each.dtype} on {each.device}")
    else:
        mixed = [each for each in tensors if not isinstance(each, CudaTensor) and each.dim() > 0]
        if there and mixed:
            raise RuntimeError(f"{name}: found tensors on cuda:0 and {mixed[0].device}, of shape {mixed[0].shape}")
    if name in NONDETERMINISTIC and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(f"{name}_cuda does not have a deterministic implementation, but you set …")
    if name not in FREE:
        launch()

    pins = options.get("pin_memory")
    options = {key: value for key, value in options.items() if key != "pin_memory"}
    if wanted is not None:
        options["device"] = CPU
    held_arguments, held_options = tree_map(_held, (arguments, options))
    with _quietly():
        found = operation(*held_arguments, **held_options)
        if "empty" in name:
            spoil(found)
    if pins:  # empty_like(…, device="cpu", pin_memory=True)
        return pin(found)
    for each in there:  # the wrapper's own sizes would stay as they were
        assert each.held.shape == each.shape, f"{name} resizes a tensor, which is not pretended here"
    found = tree_map(lambda each: _wrapped(each) if isinstance(each, torch.Tensor) else each, found)
    return return_and_correct_aliasing(operation, arguments, options, found) if there else found


def launch() -> None:
    kernels[place()] += 1
    _current.finish()  # on one stream all is done in order


def pretend_triton() -> None:
    """Run our Triton kernels in Triton's interpreter: few programs of each, because each is Python."""
    from accel_train.models import batchnorm_triton as fused

    def interpret(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        launch()
        with _quietly():
            original(kernel, grid, *map(_held, arguments), **constants)

    original, fused.launch = fused.launch, interpret
    fused.PROGRAMS, fused.TILE, fused.CHANNELS = 1, 1 << 20, 1 << 12


def _wrapped(held: torch.Tensor) -> torch.Tensor:
    return CudaTensor(held)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, CudaTensor) else value


def _on_host(name: str, operation: Any, arguments: Any, options: dict[str, Any]) -> Any:
    if name in ("pin_memory", "_pin_memory"):
        with _quietly():
            return pin(arguments[0].clone())
    if name == "is_pinned":
        return is_pinned(arguments[0])
    pins = options.pop("pin_memory", False)
    found = operation(*arguments, **options)
    return pin(found) if pins else found


def _to_device(source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """`source.to("cuda", …)`, of a tensor of the host's."""
    if not options.get("non_blocking"):
        wait("copy to the device")
    elif not is_pinned(source):
        wait("copy to the device from memory that is not pinned")
    kinds = {key: options[key] for key in ("dtype", "memory_format") if options.get(key) is not None}
    with _quietly():
        made = CudaTensor(torch.ops.aten._to_copy(source, **kinds))
        if _current is not _default and options.get("non_blocking"):
            _current.copies.append((made.held, made.held.clone()))
            spoil(made.held)
        return made


def _copied(target: torch.Tensor, source: torch.Tensor, *, blocks: bool) -> torch.Tensor:
    """`target.copy_(source)`; a single number may come from the host."""
    to_device, from_device = isinstance(target, CudaTensor), isinstance(source, CudaTensor)
    if to_device == from_device:
        kernels[place()] += 1
    else:
        host = source if to_device else target
        if blocks or not is_pinned(host):
            wait("copy_ to the device" if to_device else "copy_ to the host")
        elif not to_device:
            with _quietly():
                send_later(target, _held(source).to(target.dtype).expand(target.shape))
            return target
    with _quietly():
        _held(target).copy_(_held(source))
    return target


def _one_hot(labels: torch.Tensor, classes: int) -> torch.Tensor:
    return torch.zeros((*labels.shape, classes), dtype=labels.dtype, device=labels.device).scatter_(
        -1, labels[..., None], 1
    )


# --- torch, made to believe in it.


def install() -> None:
    """Install the pretended device. Call it before anything else of the program is imported."""
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]  # as FakeTensor does where there is no driver
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    torch.autograd.set_multithreading_enabled(False)  # the mode is known to this thread
    torch.inference_mode = torch.no_grad  # type: ignore[assignment, misc]  # its tensors cannot be wrapped
    properties = types.SimpleNamespace(
        uuid="pretended",
        name="Pretended GPU",
        major=9,
        minor=0,
        total_memory=16 << 30,
        multi_processor_count=100,
        L2_cache_size=50 << 20,
    )
    replacements = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "manual_seed": lambda _: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),  # the device draws from the host's generator
        "set_rng_state": lambda *_: None,
        "manual_seed_all": lambda _: None,
        "mem_get_info": lambda *_: (int(os.environ.get(FREE_BYTES, 8 << 30)), 16 << 30),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "max_memory_allocated": lambda *_: 1,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: wait("synchronize"),
        "current_stream": lambda *_: _current,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "device_count": lambda: 1,
        "current_device_index": lambda: 0,
        "set_device_index": lambda _: None,
        "synchronize": lambda *_: wait("synchronize"),
        "current_stream": lambda *_: _current,
    }
    for name, replacement in accelerator.items():
        setattr(torch.accelerator, name, replacement)
    torch.Generator = Generator  # type: ignore[misc]
    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]

    # Foreach and fused kernels, for parameters of this class, in groups of this device.
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        kinds = getattr(module, "_foreach_supported_types", None)
        if kinds is not None and CudaTensor not in kinds:
            kinds.append(CudaTensor)

    def on_device(group: Any) -> Any:
        def grouped(*arguments: Any, **options: Any) -> Any:
            return {
                (next(each for each in tensors[0] if each is not None).device, dtype): (tensors, places)
                for (_, dtype), (tensors, places) in group(*arguments, **options).items()
            }

        return grouped

    clip_grad._group_tensors_by_device_and_dtype = on_device(clip_grad._group_tensors_by_device_and_dtype)
    group = optimizer.Optimizer.__dict__["_group_tensors_by_device_and_dtype"].__func__
    optimizer.Optimizer._group_tensors_by_device_and_dtype = staticmethod(on_device(group))  # type: ignore

    # A module's `to` keeps its parameters and sets their data; only from the host to the device are new ones needed.
    convert = torch.nn.Module._apply

    def converted(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(fn)
        here = all(isinstance(each, CudaTensor) for each in self.parameters(recurse=False))
        torch.__future__.set_overwrite_module_params_on_conversion(not here)
        return convert(self, fn, recurse=False)

    torch.nn.Module._apply = converted  # type: ignore[method-assign, assignment]

    autocast = torch.autocast.__init__

    def of_the_cpu(self: Any, device_type: str, *arguments: Any, **options: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *arguments, **options)

    torch.autocast.__init__ = of_the_cpu  # type: ignore[method-assign, assignment]
    torch.nn.functional.one_hot = _one_hot  # type: ignore[assignment]  # on the CPU it looks at the values

    from torch.utils.data._utils import pin_memory

    loop = pin_memory._pin_memory_loop

    def in_thread(*arguments: Any) -> None:
        with PretendedCuda():
            loop(*arguments)

    pin_memory._pin_memory_loop = in_thread  # type: ignore[assignment]
    torch.utils.data._utils.pin_memory._pin_memory_loop = in_thread  # type: ignore[assignment]


def serve() -> None:
    """Run each command that arrives as a line of JSON, and answer it with a line."""
    install()
    from accelerate.state import AcceleratorState, GradientState

    from accel_train import cli
    from accel_train.records.meter import Stopwatch

    updates: list[dict[str, Any]] = []
    trained = Stopwatch.trained

    def counted(self: Stopwatch, samples: int) -> None:  # once at each update's end
        trained(self, samples)
        updates.append({"waits": dict(waits), "kernels": dict(kernels)})
        waits.clear()
        kernels.clear()

    Stopwatch.trained = counted  # type: ignore[method-assign]
    if "TRITON_INTERPRET" in os.environ:
        pretend_triton()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        command = json.loads(line)
        os.environ.update(command["variables"])
        updates.clear()
        waits.clear()
        kernels.clear()
        output = io.StringIO()
        with PretendedCuda(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                name, *words = command["words"]
                code = cli.main([name, *words])
            except BaseException:
                traceback.print_exc()
                code = -1
        print(json.dumps([code, output.getvalue(), updates]), file=answers, flush=True)
        for variable in command["variables"]:
            del os.environ[variable]
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int
    output: str
    waits: list[dict[str, int]]
    """Of each update: how often the host waited, by the line and what for."""
    kernels: list[dict[str, int]]
    """Of each update: how many it would start, by the line."""


class Pretended:
    """A process with a pretended device, which runs commands one after the other.

    `triton`: our Triton kernels run there, in its interpreter, which takes minutes; otherwise Triton fails.
    """

    def __init__(self, *, triton: bool = False) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"TRITON_INTERPRET": "1"} if triton else {}
        environment.pop("ACCELERATE_USE_CPU", None)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, *words: object, precision: str = "no", **variables: str) -> Done:
        """`variables` of the environment, as a launcher sets them."""
        assert self.process.stdin and self.process.stdout
        variables["ACCELERATE_MIXED_PRECISION"] = precision
        command = {"words": [str(word) for word in words], "variables": variables}
        print(json.dumps(command), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the process has ended with exit code {self.process.wait(10)}"
        code, output, updates = json.loads(answer)
        return Done(code, output, [each["waits"] for each in updates], [each["kernels"] for each in updates])

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


if __name__ == "__main__":
    sys.modules["pretend_cuda"] = sys.modules["__main__"]
    serve()
