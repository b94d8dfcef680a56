"""A loss or a gradient that is not finite: all processes know of it before the weights are touched.

After the backward pass of an update each process looks, on its device, whether its losses and the gradients are
finite, and one all-reduce (MAX of a single number, on the device) makes the answer everybody's. It serves DDP, FSDP2
and a loss that is not finite on one process alone. When the host reads the answer depends:

* Where waiting costs nothing or cannot be helped (the CPU, MPS, fp16, whose scaler waits anyhow, sharded parameters,
  `skip`, optimizers without a fused kernel), it is read before the optimizer's step. On a GPU that is one wait for
  the device an update.
* On CUDA with a fused optimizer (sgd, adam, adamw) and `stop` or `rewind` nobody waits: the optimizer's kernel reads
  the number itself (`found_inf`, as the GradScaler uses it) and leaves weights and state alone; the host reads it one
  update later, and always before anything is logged or saved.

With fp16 an overflow of the scaled gradients is normal: the scaler leaves such updates out and lowers its scale. It
counts as an error when the scale has fallen below 1, or when the loss itself is not finite.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchvision.utils import save_image

from accel_train.checkpoint.train_state import TrainState
from accel_train.config.schema import Config
from accel_train.data.transforms.batch import BatchTransform
from accel_train.errors import UserError
from accel_train.files import give_usual_mode
from accel_train.records.run_log import RunLog

MOST_IN_A_ROW = 10  # updates left out one after the other: then it is the model that is broken, not a sample


@dataclass
class Window:
    """What one update was computed from, on this process."""

    number: int = 0  # of the update, counted from 1
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # float32 [b] of each batch
    bad: Tensor | None = None  # on the host, 1 or 0, once `copied` has happened
    copied: Any = None


class Guard:
    """Looks at each update, and does as --on-nonfinite says; all processes must make the same calls."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        transform: BatchTransform,
        log: RunLog,
    ) -> None:
        """`model` and `optimizer` as Accelerate prepared them; `transform` is that of the training's batches."""
        self.config, self.accelerator, self.transform, self.log = config, accelerator, transform, log
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.buffers = list(model.buffers())
        self.reads_later = (
            accelerator.device.type == "cuda"
            and accelerator.scaler is None
            and config.on_nonfinite != "skip"
            and all(group.get("fused") for group in self.optimizer.param_groups)
            and not any(isinstance(parameter, DTensor) for parameter in self.parameters)
        )
        self._before: list[Tensor] = []  # the buffers before an update that is or may be left out
        self._window = Window()
        self._unread: Window | None = None  # the update before, if the host has not yet read of it
        self._everyone: list[tuple[int, int, float, float]] = []  # rank, id, loss, weight of each sample of one
        self._rewinds = False

    def begin_update(self, state: TrainState) -> None:
        """Before the first forward pass of an update, which may spoil the statistics of BatchNorm."""
        self._window = Window(state.update + 1)
        self._before = []
        if self.config.on_nonfinite == "skip" or state.update + 1 in state.left_out:
            self._before = [buffer.clone() for buffer in self.buffers]

    def add(self, batch: dict[str, Tensor], losses: Tensor) -> None:
        """A micro-batch of the update, as it came from the loader, and its losses float32 [b]."""
        self._window.batches.append(batch)
        self._window.losses.append(losses.detach())

    @torch.no_grad()
    def passes(self, state: TrainState) -> bool:
        """After the last backward pass: whether the optimizer may take its step.

        If not, the update is left out, and all is as it was before it but for its gradients. Raises UserError if
        --on-nonfinite is stop.
        """
        window = self._window
        if window.number not in state.left_out:  # else an earlier pass has found it
            bad = self._find_bad()
            if self.reads_later:
                self.optimizer.found_inf = bad
                self._read(state)
                window.bad = torch.empty((), pin_memory=True).copy_(bad, non_blocking=True)
                window.copied = torch.cuda.current_stream().record_event()
                self._unread = window
                return True
            if not bad.item():
                return True
            self._act(window, state)
        for buffer, before in zip(self.buffers, self._before, strict=bool(self._before)):
            buffer.copy_(before)
        return False

    def rewinds(self, state: TrainState, *, due: bool) -> bool:
        """At an update's end: whether the run has to go back to its last checkpoint. Raises UserError as `passes`.

        `due`: something will be logged or saved now, so that all updates must have been looked at.
        """
        if due:
            self._read(state)
        return self._rewinds

    def rewound(self) -> None:
        """The run has gone back, and goes on."""
        self._unread, self._rewinds = None, False

    def _find_bad(self) -> Tensor:
        """1 if a loss or gradient of any process is not finite, else 0; float32 [] on the device, the same on all."""
        losses, gradients = self._window.losses, []
        scaler = self.accelerator.scaler
        if scaler is None or scaler.get_scale() < 1:
            found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            local = [each.to_local() if isinstance(each, DTensor) else each for each in found]
            gradients = [each for each in local if each.numel()]
        if self.accelerator.device.type == "cpu":
            bad = torch.tensor(0.0 if _all_finite([*losses, *gradients]) else 1.0)
        else:
            values = [each.sum() for each in losses]
            if gradients:
                values.append(nn.utils.get_total_norm(gradients, norm_type=math.inf).to(values[0]))
            bad = 1 - torch.stack(values).isfinite().all().float()
        if self.accelerator.num_processes > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad

    def _read(self, state: TrainState) -> None:
        """Read the answer about the last update, if it was not yet."""
        window, self._unread = self._unread, None
        if window is not None and window.bad is not None:
            window.copied.synchronize()
            if window.bad.item():
                self._act(window, state)

    def _act(self, window: Window, state: TrainState) -> None:
        """Write down what the update was made of, and tell it; then stop, or leave it out."""
        found = self._describe(window)
        folder = self._write(window)
        policy = self.config.on_nonfinite
        broken = {*range(window.number - MOST_IN_A_ROW, window.number)} <= {*state.left_out}
        if policy == "stop" or broken:
            self.log.directory.event(f"not finite: {found}", update=window.number, action="stop")
            advice = (
                f"so were the {MOST_IN_A_ROW} before it, which were left out: lower optim.lr in a new run"
                if broken
                else "go on from there with another optim.lr (--allow-change), or with --on-nonfinite skip or rewind"
            )
            raise UserError(
                f"Update {window.number} is not finite: {found}. Its samples are in {folder}. "
                f"The last checkpoint is whole; {advice}."
            )
        state.left_out.append(window.number)
        self._rewinds = policy == "rewind"
        self.log.log_skipped_update(window.number, found, state, action=policy)

    def _describe(self, window: Window) -> str:
        """What is not finite, in words, the same on all processes; the ids go to nonfinite/update-….json."""
        ids = torch.cat([batch["ids"] for batch in window.batches]).tolist()
        weights = torch.cat([batch["weights"] for batch in window.batches]).tolist()
        losses = torch.cat(window.losses).tolist()
        rank = self.accelerator.process_index
        here = [(rank, *each) for each in zip(ids, losses, weights, strict=True)]
        self._everyone = gather_object(here)
        bad = [id_ for _, id_, loss, _ in self._everyone if not math.isfinite(loss)]
        if not bad:
            return "the gradient, though all losses are finite"
        shown = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        return f"the loss of {len(bad)} of {len(self._everyone)} samples (ids {shown})"

    def _write(self, window: Window) -> str:
        """The images as they were loaded and as the model saw them, a file a process; the ids of all in one."""
        folder = self.log.directory.path / "nonfinite"
        name = f"update-{window.number:08d}"
        if not self.log.directory.lease.holds(fresh=True):
            return str(folder)
        try:
            folder.mkdir(exist_ok=True)
            mine = folder / f"{name}-rank-{self.accelerator.process_index}"
            # The augmentation is a function of the batch alone: what the model saw can be made once more.
            tensors = [{**batch, "inputs": self.transform(batch)[0]} for batch in window.batches]
            together = {key: torch.cat([each[key] for each in tensors]).cpu().contiguous() for key in tensors[0]}
            save_file({**together, "losses": torch.cat(window.losses).cpu()}, mine.with_suffix(".safetensors"))
            give_usual_mode(mine.with_suffix(".safetensors"))
            save_image(together["images"].float() / 255, mine.with_suffix(".png"), nrow=16)
            if self.accelerator.is_main_process:
                samples = [
                    {"id": id_, "rank": rank, "loss": loss if math.isfinite(loss) else str(loss)}
                    for rank, id_, loss, weight in self._everyone
                    if weight > 0
                ]
                text = json.dumps({"update": window.number, "samples": samples}, indent=1)
                (folder / f"{name}.json").write_text(text + "\n")
        except OSError as error:
            self.log.console.warn(f"the samples of update {window.number} cannot be written: {error}")
        return str(folder)


def _all_finite(tensors: list[Tensor]) -> bool:
    """Whether all values of tensors in the host's memory are finite. To sum them is the fastest way to read them."""
    # The sum of finite ones may overflow.
    return all(math.isfinite(each.sum().item()) or bool(each.isfinite().all()) for each in tensors)
