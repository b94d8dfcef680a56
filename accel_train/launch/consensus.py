"""One process decides and all act: what only the main process can know (a clock, a disk) is sent to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from accel_train.errors import UserError

T = TypeVar("T")


def broadcast_from_main(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """Call `decide` on the main process, and return its result on every process. Collective.

    A UserError that it raises is raised on every process.
    """
    outcome: list[T | UserError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [decide()]
        except UserError as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]
