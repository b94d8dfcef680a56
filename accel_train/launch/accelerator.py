"""Create the `Accelerator` for the processes that the launcher promised, or raise a clear error; what it computes in.

torch has an older switch for TF32 (`set_float32_matmul_precision`, `allow_tf32`) and a newer one (`fp32_precision`).
After the newer one was set, the older getters may raise, and inductor still calls them. So TF32 is turned on with the
older one, and only the newer one is read: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import distributed

from accel_train.compat import set_collective_timeout, set_store_timeout
from accel_train.errors import UserError, how_to_get, reason_of
from accel_train.files import read_regular_file, read_yaml
from accel_train.launch.agreement import connecting
from accel_train.launch.environment import Launch
from accel_train.launch.process import gpu_asked_for, hostname, is_yes

START_SECONDS = 3600.0  # downloads and compilation take long

LAUNCHER_CONFIG = "ACCEL_TRAIN_LAUNCHER_CONFIG"
"""Names a config file of Accelerate's. The job scripts set it for processes without a launcher."""
NEED_LAUNCHER = ("use_deepspeed", "use_megatron_lm", "tpu")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def create_accelerator(
    launch: Launch,
    *,
    gradient_accumulation_steps: int = 1,
    kwargs_handlers: Iterable[Any] = (),
    rendezvous_seconds: float = 600.0,
    collective_seconds: float = 1800.0,
    share_gpus: bool = False,
) -> Accelerator:
    """Create the Accelerator for the processes that `launch` promises; the precision is set by the launcher.

    `rendezvous_seconds` is how long the first processes wait for the last one, and gloo to connect them all;
    `collective_seconds` is how long a collective may take until `compat.set_collective_timeout` changes that:
    downloads happen in between. With `share_gpus` several processes of a node may use one GPU; gloo allows that, NCCL
    does not.

    Raises UserError if processes are missing, exist twice or share a GPU, or if the world is another one; also if the
    launcher was asked for GPUs and there is none, or for fp16 on a CPU, or if a GPU has no memory left.
    """
    if file := os.environ.get(LAUNCHER_CONFIG):
        os.environ.update(launcher_variables(file, launch))
    device: torch.device | None = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    forced = is_yes(os.environ.get("ACCELERATE_USE_CPU"))
    # Without cpu=True each of several processes would be alone on a host that has no accelerator, and on MPS.
    cpu = forced or device is None or (device.type == "mps" and launch.world_size > 1)
    # A process that trains several times still has the process group of the first time.
    known = distributed.is_initialized()
    own_gpu = "" if cpu or device is None or share_gpus else _device_id(device, launch)
    trouble = _missing_gpu(launch) if device is None and not forced else ""
    if not cpu and device is not None and not known:
        trouble = _full_gpu(device, launch)
    if cpu and os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        trouble = trouble or "fp16 was asked for, but Accelerate has none on a CPU: give --mixed_precision bf16 or no."
    store = None
    if launch.world_size > 1 and not known:
        from accel_train.launch.rendezvous import rendezvous_of_ranks

        store = rendezvous_of_ranks(launch, own_gpu, rendezvous_seconds, trouble)
    elif trouble and not known:
        raise UserError(trouble)
    group: dict[str, Any] = {"timeout": timedelta(seconds=rendezvous_seconds)}  # while gloo connects
    if device is not None and not cpu and launch.world_size > 1:
        # Accelerate and DDP use LOCAL_RANK as a device's index. A process that sees only its own GPU (srun
        # --gpus-per-task, a container, a cgroup) must use index 0, whatever its own number on the node.
        os.environ["LOCAL_RANK"] = str(_device_index(launch))
        if share_gpus and device.type == "cuda":
            group["backend"] = "gloo"
    # torch 2.15 renames the option; Accelerate 1.15 does not know the new name.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    with connecting():
        accelerator = Accelerator(
            cpu=cpu,
            dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
            # A plugin, because ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides a plain number.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=gradient_accumulation_steps),
            kwargs_handlers=[
                InitProcessGroupKwargs(**group),
                # The buffers are equal on all processes (models/batchnorm.py): DDP need not broadcast them. For models
                # that change others models/trial.py sets it.
                DistributedDataParallelKwargs(broadcast_buffers=False),
                *kwargs_handlers,
            ],
        )
    if not known:
        set_collective_timeout(collective_seconds)
        set_store_timeout(collective_seconds)
    del store  # rank 0 had to serve the store until the process group had taken it over
    _give_index(accelerator)
    if cpu and not known:  # a gloo group that is still open when Python exits may abort it, with another exit code
        atexit.register(accelerator.state.destroy_process_group)
    if (accelerator.num_processes, accelerator.process_index) != (launch.world_size, launch.rank):
        raise UserError(
            f"The launcher ({launch.launcher}) promised process {launch.rank} of {launch.world_size}, but "
            f"Accelerate made process {accelerator.process_index} of {accelerator.num_processes}: each would "
            "train alone. Compare the launcher's config file with those in accelerate_configs/."
            + how_to_get("accelerate_configs/"),
            every_process=False,
        )
    return accelerator


def _missing_gpu(launch: Launch) -> str:
    """What is wrong if accelerate's config asks for a GPU and there is none; "" if it does not ask. Accelerate would
    silently train on the CPU, in bf16."""
    asked = gpu_asked_for(os.environ.get(LAUNCHER_CONFIG))
    if asked is None:
        return ""
    hidden = "".join(f", {name} is {os.environ[name]!r}" for name in VISIBLE if name in os.environ)
    config = f"accelerate_configs/{'cpu' if launch.world_size == 1 else 'multi_cpu'}.yaml"
    return (
        f"A GPU was asked for ({asked}), but torch {torch.__version__} finds none on {hostname()} "
        f"({_why_no_gpu()}{hidden}). To train on the CPU: --config_file {config}.{how_to_get(config)}"
    )


def _full_gpu(device: torch.device, launch: Launch) -> str:
    """What is wrong if other programs have taken the GPU's memory, so that not even its context fits; else ""."""
    index = _device_index(launch)
    try:
        torch.empty(0, device=torch.device(device.type, index))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return (
            f"{device.type}:{index} of {hostname()} has no free memory ({reason_of(error, 200)}): other programs use "
            "it. nvidia-smi shows them; a killed job's processes may be left. End them, or ask for another node."
        )
    return ""


def _why_no_gpu() -> str:
    """What torch says: whether it was built for GPUs, and what it hears from the driver."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return reason_of(error, 200)
    return "torch.accelerator has none"


def _give_index(accelerator: Accelerator) -> None:
    """Set the accelerator's device to that of its tensors: "cuda:0", where a single process gets "cuda".

    torch takes the two for different devices, and so would every comparison.
    """
    device = torch.empty(0, device=accelerator.device).device
    for state in (PartialState(), accelerator.state):  # the second is a copy of the first
        state.device = device


def _device_index(launch: Launch) -> int:
    """The index of this process's device among the devices that it sees. It does not matter what hides the others
    (CUDA_VISIBLE_DEVICES, a container, a cgroup, variables of HIP, ROCr or Level Zero): the driver counts the rest."""
    return launch.local_rank % torch.accelerator.device_count()


def _device_id(device: torch.device, launch: Launch) -> str:
    """An identifier that differs between the GPUs of a host, even where each process sees only one GPU."""
    if device.type not in ("cuda", "xpu"):
        return ""
    properties = torch.get_device_module(device).get_device_properties(_device_index(launch))
    if device.type == "cuda" and not torch.version.hip and hasattr(properties, "pci_bus_id"):
        # NCCL compares this, too. Two MIG slices of one GPU share it, and NCCL refuses to connect them.
        return f"PCI {properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    return str(getattr(properties, "uuid", ""))


def launcher_variables(file: str, launch: Launch) -> Mapping[str, str]:
    """The variables for Accelerate and its plugins that a launcher with this config file would set.

    Under `srun python`, or alone in a job, nobody else reads it. A file that asks for more than precision,
    torch.compile and FSDP is refused.

    Accelerate's launcher has no public function for this. `_validate_launch_command` and `prepare_multi_gpu_env` are
    its internals, checked with accelerate 1.15.0; tests/launch/test_launcher_config.py compares the result with what
    `accelerate launch` really sets. Raises UserError.
    """
    if not Path(file).is_file():
        raise UserError(
            f"{LAUNCHER_CONFIG} is {file}, but there is no such file. Give the path of a file, or unset it."
        )
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    world = ["--num_processes", str(launch.world_size), "--num_machines", "1", "--machine_rank", "0"]
    line = ["--config_file", file, "--gpu_ids", "all", "--main_process_port", "0", *world, "script"]
    try:
        read_yaml(read_regular_file(Path(file), follow=True))  # within limits, before accelerate reads it
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
        unsupported = [name for name in NEED_LAUNCHER if getattr(arguments, name)]
        if unsupported:
            raise ValueError(f"{unsupported[0].removeprefix('use_')} is not possible without accelerate's launcher")
        set_by_launcher = prepare_multi_gpu_env(arguments)
    # Accelerate raises all of these for a file that it does not understand.
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"accelerate cannot use the config file {file}: {reason}") from None
    environment = {
        name: value
        for name, value in set_by_launcher.items()
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) and os.environ.get(name) != value
    }
    if getattr(arguments, "use_cpu", False):
        environment["ACCELERATE_USE_CPU"] = "true"
    if arguments.use_fsdp and launch.world_size == 1:
        # Accelerate uses FSDP only if there is a process group, even for a single process
        environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.main_process_port)}
    return environment


def start_seconds(hang_seconds: float) -> float:
    """How long a start may make no progress until its first update, if later `hang_seconds` are too long (0: never)."""
    return max(START_SECONDS, hang_seconds) if hang_seconds else 0.0


def collective_seconds(limit: float) -> float:
    """The time-out of collectives where the watchdog ends a hang after `limit` seconds (0: never); it comes first."""
    return limit + 60 if limit else timedelta(days=365).total_seconds()


def precision(accelerator: Accelerator) -> str:
    """What the forward pass computes in: "fp32", "tf32", "bf16", "fp16" or "fp8".

    "tf32": float32, where CUDA may round the inputs of matrix products or convolutions to TF32.
    """
    asked, kind = str(accelerator.mixed_precision), accelerator.device.type
    if asked != "no":
        return asked
    return "tf32" if kind == "cuda" and uses_tf32() else "fp32"


def _float32_switches() -> list[Any]:
    """What has an attribute `fp32_precision`: "tf32", "ieee", or "none" for the default, which is not to round."""
    backends: Any = torch.backends
    return [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]


def use_tf32() -> None:
    """Let CUDA round the float32 inputs of matrix products to TF32. Those of convolutions are rounded by default."""
    torch.set_float32_matmul_precision("high")


def uses_tf32() -> bool:
    """Whether CUDA may round float32 inputs of matrix products, convolutions or recurrent layers to TF32."""
    overruled = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"  # NVIDIA's libraries read it
    return not overruled and any(switch.fp32_precision == "tf32" for switch in _float32_switches())


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute in full float32 inside."""
    before = [switch.fp32_precision for switch in _float32_switches()]
    try:
        for switch in _float32_switches():
            switch.fp32_precision = "ieee"
        yield
    finally:
        for switch, value in zip(_float32_switches(), before, strict=True):
            switch.fp32_precision = value
