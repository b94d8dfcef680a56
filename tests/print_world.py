"""Create an Accelerator as the trainer does, and print its world as one line of JSON.

Started by tests through launchers. FACT_n is what rank n says of its configuration, SHARED_n its output directory.
"""

import json
import os
import sys
import time
from pathlib import Path

from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment


def main() -> None:
    launch = prepare_environment()
    if os.environ.get("FAIL_ONCE") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise SystemExit("failing on purpose, to be restarted")
    if os.environ.get("LATE_RANK") == str(launch.rank):
        time.sleep(1)
    from accel_train.launch.accelerator import create_accelerator  # imports torch, which reads what is prepared above

    seconds = float(os.environ.get("RENDEZVOUS_SECONDS", "60"))
    accelerator = create_accelerator(launch, gradient_accumulation_steps=3, rendezvous_seconds=seconds)

    import torch

    from accel_train.compat import set_collective_timeout
    from accel_train.launch.agreement import check_agreement, check_shared_directory

    check_agreement(accelerator, configuration=os.environ.get(f"FACT_{launch.rank}", "a"), versions="1")
    if f"SHARED_{launch.rank}" in os.environ:
        check_shared_directory(accelerator, Path(os.environ[f"SHARED_{launch.rank}"]), seconds=0.5)
    set_collective_timeout(30)
    total = accelerator.reduce(torch.ones(1, device=accelerator.device)).item()
    world = {
        "launcher": launch.launcher,
        "rank": accelerator.process_index,
        "world_size": accelerator.num_processes,
        "local": [launch.local_rank, launch.local_world_size],
        "sum": int(total),
        "accumulation": accelerator.gradient_accumulation_steps,
        "precision": accelerator.mixed_precision,
        "dynamo": accelerator.state.dynamo_plugin.backend.value,
        "threads": torch.get_num_threads(),
        "split_batches": accelerator.split_batches,
    }
    sys.stdout.write(json.dumps(world) + "\n")  # one write, so that lines of processes do not mix
    sys.stdout.flush()
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.stdout.write(f"UserError: {error}\n")
        sys.stdout.flush()
        raise SystemExit(2) from None
