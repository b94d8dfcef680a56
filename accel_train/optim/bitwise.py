"""What `--bitwise true` needs besides exact sums: deterministic kernels, the random numbers of a virtual batch, and to
know what the bits depend on.

A kernel's result depends on the shapes, the kind of device, the libraries and, on a CPU, the number of threads. The
shapes are those of one virtual batch (data/order/plan.py). The rest is recorded in each checkpoint, and compared
between the processes and at each start.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.dataclasses import DynamoBackend

from accel_train.config.schema import Config
from accel_train.errors import UserError
from accel_train.keyed import key
from accel_train.launch.precision import precision
from accel_train.optim.performance import seed_generators


def use_deterministic_kernels(config: Config, accelerator: Accelerator) -> None:
    """Prepare torch for `config`; without --bitwise, allow all kernels. Call it before the first forward pass.

    Raises UserError if the run cannot be computed bitwise.
    """
    torch.use_deterministic_algorithms(config.bitwise)
    if not config.bitwise:
        return
    _check(config, accelerator)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Else torch fills each new tensor first, so that programs that read it before they write it are deterministic too.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it chooses the kernel that is fastest at the moment


def _check(config: Config, accelerator: Accelerator) -> None:
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
    elif config.model.sync_batchnorm and device == "cuda":
        obstacle = "model.sync-batchnorm sums over the processes in floats: set it to false"
    if obstacle is not None:
        raise UserError(f"--bitwise: {obstacle}.")


def seed_pass(config: Config, accelerator: Accelerator, update: int, number: int) -> None:
    """Seed what a model may draw from in forward pass `number` of this process in `update`: a restart draws the same.

    With --bitwise the pass is one virtual batch, and the seed follows from its number in the update, in which the
    processes take turns (data/order/plan.py): so all that a model draws is the same on any number of processes, also
    from NumPy's and Python's generators.
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    if not config.bitwise:
        seed_generators(accelerator.device, key(config.seed, "dropout", update, process, number))
        return
    word = key(config.seed, "dropout", update, 0, number * processes + process)  # as on one process without --bitwise
    seed_generators(accelerator.device, word)
    np.random.seed(word % 2**32)
    random.seed(word)


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
