"""`accel-train train ARGUMENTS` under FSDP2 on the CPU: accelerate launch --config_file FSDP2 fsdp_worker.py ARGUMENTS

Accelerate leaves FSDP out on a CPU, where it works all the same; so it is put back in once the Accelerator is made.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin

from accel_train import cli, training_setup


def with_fsdp(*arguments: Any, **options: Any) -> Accelerator:
    accelerator = create_accelerator(*arguments, **options)
    plugin = FullyShardedDataParallelPlugin()  # as the variables say that accelerate launch makes of the file
    assert plugin.fsdp_version == 2
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
        state._shared_state["fsdp_plugin"] = plugin
    prepare = accelerator.prepare

    def prepared(model: Any, optimizer: Any) -> Any:
        model, optimizer = prepare(model, optimizer)
        assert all(hasattr(parameter, "placements") for parameter in model.parameters())  # each is split
        kinds = [type(module).__name__ for module in model.modules()]
        print(f"sharded {sum('FSDP' in kind for kind in kinds)}, {sum('Checkpoint' in kind for kind in kinds)} anew")
        return model, optimizer

    accelerator.prepare = prepared
    return accelerator


create_accelerator, training_setup.create_accelerator = training_setup.create_accelerator, with_fsdp
sys.exit(cli.main(["train", *sys.argv[1:]]))
