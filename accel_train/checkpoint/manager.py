"""The trainer's checkpoints: `checkpoints/update-00001234/` in the run's directory.

store.py saves and restores them; resume.py checks that the run can go on from one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from accel_train.checkpoint.format import Snapshot
from accel_train.checkpoint.resume import RunParts, plan_restore
from accel_train.checkpoint.store import CheckpointStore, RestorePlan
from accel_train.config.compatibility import IN_MEMORY, SEMANTICS, check_changes, differences, learning_fingerprint
from accel_train.config.schema import Config, as_dict
from accel_train.optim.bitwise import what_bits_depend_on
from accel_train.optim.optimizer import BIASES
from accel_train.ownership.lease import Lease


class Checkpoints(CheckpointStore):
    """The checkpoints of a run with a configuration: they name its settings, and a resume compares them."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        samples: int,
        ema: nn.Module | None = None,
        schedule: Stateful | None = None,
        lease: Lease | None = None,
        pixels: int = IN_MEMORY,
        table: str = "",
    ) -> None:
        """As `CheckpointStore`. `samples`: number of training samples. `ema`: timm's ModelEmaV3 around the same model,
        or the module in it. `pixels`: the semantics number by which the data's pixels are computed
        (`Splits.semantics`). `table`: the SHA-256 of the table that lists the data, if one does.
        """
        self.config = config
        self.parts = RunParts(
            config,
            samples,
            table,
            pixels,
            model,
            getattr(ema, "module", ema),
            getattr(optimizer, "optimizer", optimizer),
            # All other schedules follow from the update's number, even if their settings are allowed to change.
            schedule if config.schedule.name == "plateau" else None,
            what_bits_depend_on(accelerator) if config.bitwise else {},
        )
        super().__init__(
            folder,
            accelerator,
            model,
            self.parts.optimizer,
            lease=lease or Lease(folder.parent, None),
            ema=self.parts.ema,
            schedule=self.parts.schedule,
            keep=config.checkpoint.keep,
            milestone_epochs=config.checkpoint.milestone_epochs,
        )
        self.changed: tuple[str, ...] = ()
        """The options that are not those of the checkpoint from which the run goes on. On the main process."""
        self.rate_before = 0.0
        """The learning rate that the next update would have had with the checkpoint's. On the main process."""
        self.description = {
            "seed": config.seed,
            "samples": samples,
            "table": table,
            "configuration": as_dict(config),
            "configuration_digest": learning_fingerprint(config),
            "semantics": SEMANTICS,
            "pixels": pixels,
            "bits": self.parts.bits,
        }

    def _plan_restore(self, resume: str, allow: Sequence[str]) -> RestorePlan | None:
        check_changes({}, Config(), allow)  # so that an unknown key is refused in a new run, too
        return super()._plan_restore(resume, allow)

    def _match(self, path: Path, snapshot: Snapshot, allow: Sequence[str]) -> tuple[RestorePlan, Snapshot]:
        plan = plan_restore(path, snapshot, self.parts, allow, self.notes)
        self.changed = tuple(differences(snapshot.state["configuration"], self.config))
        self.rate_before = _rate_in(snapshot.optimizer)
        return plan


def _rate_in(optimizer: Mapping[str, Any]) -> float:
    """The learning rate in an optimizer's state, which may be of another optimizer, or damaged: then it is 0."""
    try:
        return max(float(group["lr"]) for group in optimizer["param_groups"] if BIASES not in group)
    except (LookupError, TypeError, ValueError):
        return 0.0
