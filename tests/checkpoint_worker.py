"""Saves and restores checkpoints of a tiny run: `torchrun … tests/checkpoint_worker.py STEPS.json [fsdp]`.

STEPS.json is a list of steps, each done by all processes with a new model:
    {"save": FOLDER, "updates": 3, "dump": FILE}       train, save, then write the state to FILE.RANK
    {"restore": FOLDER, "dump": FILE, "resume": …}     restore into a model with other weights, write its state
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from accel_train.checkpoint.state import TrainState, gather_to_main, named_tensors, optimizer_state
from accel_train.checkpoint.store import Checkpoints
from accel_train.config.schema import Checkpoint, Config
from accel_train.errors import UserError
from accel_train.ownership.owner import Lease


def same(one: object, other: object) -> bool:
    """Whether two states are equal, to the bit and with their dtypes."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


def tiny_model() -> nn.Module:
    """A model with BatchNorm (integer buffers), sizes that 2 and 4 do not divide, and tied weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(96, 7),
        nn.Linear(7, 7),
        nn.Linear(7, 7),
    )
    model[5].weight = model[4].weight
    return model


def train(model: nn.Module, optimizer: Any, ema: AveragedModel | None, accelerator: Any, updates: int) -> None:
    """Train on noise, so that the model and the optimizer have all their state."""
    for number in range(updates):
        generator = torch.Generator().manual_seed(1000 * number + accelerator.process_index)
        loss = model(torch.randn(8, 1, 4, 4, generator=generator)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update_parameters(accelerator.unwrap_model(model))


def build(accelerator: Accelerator, folder: str, seed: int, *, fsdp: bool, **settings: Any) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = None if fsdp else AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if fsdp:
        assert any(hasattr(parameter, "placements") for parameter in model.parameters())
    config = Config(epochs=2, checkpoint=Checkpoint(**settings))
    lease = Lease(Path(folder).parent, None)
    checkpoints = Checkpoints(config, accelerator, model, optimizer, lease, samples=64, ema=ema and ema.module)
    checkpoints.folder = Path(folder)
    return model, optimizer, ema, checkpoints


def dump(file: str, accelerator: Any, model: nn.Module, optimizer: Any, ema: Any, position: Any) -> None:
    """Write the whole state as each process has it."""
    state = {
        "model": named_tensors(model),
        "ema": named_tensors(ema.module) if ema is not None else None,
        "optimizer": optimizer_state(model, optimizer.optimizer),
        "position": vars(position),
    }
    torch.save(gather_to_main(state, here=True), f"{file}.{accelerator.process_index}")


def run(steps: list[dict[str, Any]], *, fsdp: bool = False) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if fsdp:  # Accelerate leaves FSDP out on a CPU, where it works all the same
        for state in (PartialState(), AcceleratorState()):
            state._shared_state["distributed_type"] = DistributedType.FSDP
            state._shared_state["fsdp_plugin"] = plugin
    for seed, step in enumerate(steps):
        folder = step.get("save") or step.get("restore")
        model, optimizer, ema, checkpoints = build(accelerator, folder, seed, fsdp=fsdp, keep=2)
        parts = (model, optimizer, ema)
        if "save" in step:
            train(*parts, accelerator, step["updates"])
            position = TrainState(epoch=1, update=step["updates"], samples_seen=24, epoch_loss_sum=0.1, epoch_count=3)
            checkpoints.save(position)
            dump(step["dump"], accelerator, *parts, position)
            train(*parts, accelerator, 2)  # while it is written: the copy must not follow
            checkpoints.wait()
            assert not checkpoints.failures, checkpoints.failures
        else:
            try:
                position = checkpoints.restore(step["resume"], step.get("allow", ()))
                dump(step["dump"], accelerator, *parts, position)
                train(*parts, accelerator, 1)  # what was restored can be trained on
            except UserError as error:
                Path(f"{step['dump']}.{accelerator.process_index}").write_text(str(error))
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), fsdp="fsdp" in sys.argv)
