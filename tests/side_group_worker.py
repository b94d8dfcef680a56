"""Connect two processes; then one announces another interface for the process group of stop signals.

`python side_group_worker.py RANK INTERFACE SECONDS`
"""

import os
import sys

from accel_train.errors import UserError
from accel_train.launch.environment import prepare_environment

launch = prepare_environment()

import torch  # noqa: E402

from accel_train.launch.accelerator import create_accelerator  # noqa: E402
from accel_train.launch.stopping import StopRequests  # noqa: E402

code = 0
create_accelerator(launch, rendezvous_seconds=60)
if launch.rank == int(sys.argv[1]):
    os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[2]
try:
    with StopRequests() as stopping:
        stopping.begin(None, 0, float(sys.argv[3]))
    torch.distributed.barrier()  # rank 0 serves the store in which the other one may still be reading
    print("connected")
except UserError as error:
    print(f"rank {launch.rank}: {error}")
    code = 2
sys.stdout.flush()
os._exit(code)  # as after a failure: the group that is open would wait for the other process
