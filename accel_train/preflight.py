"""Check the processes of a launcher before a long run: `accelerate launch … -m accel_train.preflight [DIRECTORY]`.

Can they connect, do they have the same versions, do they share DIRECTORY, and how fast do they add up their gradients?
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment

MEBIBYTES, REPEATS = 100, 5  # about the size of the gradients of a ResNet-50 in float32


def main(arguments: list[str]) -> int:
    """Print a line for each process and the speed of all; return the exit code, which is 2 if a check fails."""
    try:
        launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
        from accel_train.launch.accelerator import create_accelerator

        accelerator = create_accelerator(launch, rendezvous_seconds=120, collective_seconds=120)
        import accelerate
        import torch
        from accelerate.utils import gather_object

        from accel_train.launch.process import hostname
        from accel_train.launch.rendezvous import check_agreement, check_shared_directory

        versions = {"python": platform.python_version(), "torch": torch.__version__}
        versions |= {"accelerate": accelerate.__version__, "cuda": str(torch.version.cuda)}
        check_agreement(accelerator, **versions)
        for directory in arguments:
            check_shared_directory(accelerator, Path(directory))
        device = accelerator.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        line = f"{hostname()}  {device} ({name})  {torch.get_num_threads()} threads"
        lines = gather_object([line])
        gradients = torch.ones(MEBIBYTES * 2**18, device=device)
        seconds = []
        for _ in range(1 + REPEATS):  # the first sum includes the time to connect
            accelerator.wait_for_everyone()
            start = time.perf_counter()
            total = accelerator.reduce(gradients, "sum")[-1].item()
            seconds.append(time.perf_counter() - start)
        if total != launch.world_size:
            raise UserError(f"The sum over {launch.world_size} processes is {total}: the network or a GPU is broken.")
        if accelerator.is_main_process:
            best = min(seconds[1:])
            print(*(f"rank {rank}: {line}" for rank, line in enumerate(lines)), sep="\n")
            print(", ".join(f"{key} {version}" for key, version in versions.items()))
            print(f"{launch.world_size} processes ({launch.launcher}); adding up {MEBIBYTES} MiB takes {best:.4f} s")
            print("preflight passed", flush=True)
        accelerator.end_training()
        return 0
    except UserError as error:
        print(f"preflight failed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
