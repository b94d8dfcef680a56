"""What `--bitwise true` needs besides exact sums: deterministic kernels, and to know what the bits depend on.

A kernel's result depends on the shapes, the kind of device, the libraries and, on a CPU, the number of threads. The
shapes are those of one virtual batch (data/order.py). The rest is recorded in each checkpoint, and compared
between the processes and at each start.

Some layers have no deterministic kernel on CUDA (docs.pytorch.org/docs/stable/generated/
torch.use_deterministic_algorithms.html has the list): adaptive pooling is replaced, others are named. torch raises at
the first backward pass of such a layer, so one is tried before the run.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.launch.accelerator import precision
from accel_train.models.trial import different_images, restored


def use_deterministic_kernels(config: Config, accelerator: Accelerator) -> None:
    """Prepare torch for `config`; without --bitwise, allow all kernels. Call it before the first forward pass.

    Raises UserError if the run cannot be computed bitwise.
    """
    if config.bitwise:
        compute_deterministically(accelerator, "--bitwise")
    elif torch.are_deterministic_algorithms_enabled():  # by an earlier run; to ask for it imports torch's compiler
        torch.use_deterministic_algorithms(False)


def compute_deterministically(accelerator: Accelerator, what: str = "The same bits on any number of processes") -> None:
    """Let torch use deterministic kernels alone, on as many threads as OMP_NUM_THREADS says, or on one.

    Call it before the first forward pass. Raises a UserError that begins with `what` if `accelerator` cannot do that.
    """
    _check(accelerator, what)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Else torch fills each new tensor first, so that programs that read it before they write it are deterministic too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it chooses the kernel that is fastest at the moment


def _check(accelerator: Accelerator, what: str) -> None:
    device, kind = accelerator.device.type, precision(accelerator)
    obstacle = None
    if accelerator.distributed_type == DistributedType.FSDP:
        obstacle = "FSDP sums the gradients itself, in an order that depends on the processes: use DDP"
    elif accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        obstacle = "torch.compile may choose its kernels by their speed: start without --dynamo_backend"
    elif kind not in ("fp32", "tf32", "bf16"):
        obstacle = f"{kind} skips updates by a scale of its own: use bf16 or fp32 (--mixed_precision)"
    elif device not in ("cpu", "cuda"):
        obstacle = f"{device} devices have no float64, which the exact sums need: use a CPU or an NVIDIA or AMD GPU"
    if obstacle is not None:
        raise UserError(f"{what}: {obstacle}.")


def what_bits_depend_on(accelerator: Accelerator) -> dict[str, str]:
    """What another result may come from, besides the configuration and the data: name -> value."""
    device = accelerator.device
    facts = {"device": device.type, "precision": precision(accelerator), "torch": torch.__version__}
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
        facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    else:
        facts["CPU's instructions"] = torch.backends.cpu.get_cpu_capability()
        facts["threads of a process"] = str(torch.get_num_threads())
    return facts


class DeterministicAvgPool2d(nn.AdaptiveAvgPool2d):
    """AdaptiveAvgPool2d: the same values, of kernels whose backward pass is deterministic on CUDA."""

    def forward(self, input: Tensor) -> Tensor:
        """`input`: [b, C, H, W] or [C, H, W]."""
        return _pool(input, self.output_size, lambda values, dim: values.mean(dim))


class DeterministicMaxPool2d(nn.AdaptiveMaxPool2d):
    """AdaptiveMaxPool2d, likewise. Of equal values another one may get the gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """`input`: [b, C, H, W] or [C, H, W]."""
        return _pool(input, self.output_size, lambda values, dim: values.max(dim).values)


REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool2d: DeterministicAvgPool2d,
    nn.AdaptiveMaxPool2d: DeterministicMaxPool2d,
}


def use_deterministic_layers(config: Config, model: nn.Module, channels: int, size: int) -> None:
    """With --bitwise, replace the layers of `model` that have no deterministic kernel on CUDA, in place, and look for
    others with random images [4, channels, size, size].

    `model` is on its device; on a CPU nothing is done, because all its kernels are deterministic. Raises UserError if a
    backward pass has an operator that is not.
    """
    parameter = next(model.parameters())
    device = parameter.device
    if not config.bitwise or device.type != "cuda":
        return
    for module in model.modules():
        replacement = REPLACED.get(type(module))
        if replacement is not None and not getattr(module, "return_indices", False):
            module.__class__ = replacement
    try:
        with restored(model, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = model(different_images(channels, size).to(device, parameter.dtype))
            output.float().square().sum().backward()
    except Exception as error:  # whatever a model does: only this mistake is looked for
        if found := re.search(r"^(\S+) does not have a deterministic implementation", str(error)):
            raise UserError(
                f"--bitwise: the model uses {found[1]}, which has no deterministic kernel on CUDA. Replace the layer, "
                "choose another model, or train without --bitwise."
            ) from error


def _pool(input: Tensor, output_size: Any, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Pool the last two dimensions to `output_size`: a number or a pair, of which None keeps the input's."""
    sizes = output_size if isinstance(output_size, tuple) else (output_size, output_size)
    for dim, count in zip((-2, -1), sizes, strict=True):
        input = _pool_dimension(input, dim, count, reduce)
    return input


def _pool_dimension(input: Tensor, dim: int, count: int | None, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Pool one dimension to `count` windows; window i goes from floor(i n / count) to ceil((i + 1) n / count)."""
    length = input.shape[dim]
    if count is None or count == length:
        return input
    if length % count == 0:
        first = input.dim() + dim
        windows = (*input.shape[:first], count, length // count, *input.shape[first + 1 :])
        return reduce(input.reshape(windows), first + 1)
    starts = [number * length // count for number in range(count)]
    ends = [-(-(number + 1) * length // count) for number in range(count)]
    parts = [reduce(input.narrow(dim, start, end - start), dim) for start, end in zip(starts, ends, strict=True)]
    return torch.stack(parts, dim)
