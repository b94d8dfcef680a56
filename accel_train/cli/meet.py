"""`accel-train meet`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from accel_train.cli.common import below_one
from accel_train.config.options import CommandOptions, parse_command_of_recipe
from accel_train.errors import print_line
from accel_train.launch.meeting import meet as meet_hosts


@dataclass(frozen=True)
class Meet(CommandOptions):
    """Wait for the other hosts before the launcher starts on each of them, and name those that are missing.

    Launchers wait up to ten minutes for a host that does not come, and do not name it. Give the options of accelerate
    launch, and those of the training: accel-train meet RECIPE --num-machines 2 … && accelerate launch …
    """

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")] = "digits"
    """A recipe, as for train. Of its options, rendezvous-timeout-seconds is used."""
    num_machines: int = 1
    """How many hosts there are."""
    machine_rank: int = 0
    """The number of this host, from 0."""
    main_process_ip: str = "127.0.0.1"
    """Name or address of host 0."""
    main_process_port: int = 29500
    """A free port of host 0."""

    def mistakes(self) -> list[str]:
        mistakes = below_one(num_machines=self.num_machines)
        if not mistakes and not 0 <= self.machine_rank < self.num_machines:
            mistakes.append(f"--machine-rank: expected 0 to {self.num_machines - 1}, found {self.machine_rank}.")
        if not 0 < self.main_process_port < 65536:
            mistakes.append(f"--main-process-port: expected 1 to 65535, found {self.main_process_port}.")
        return mistakes


def meet(arguments: Sequence[str]) -> int:
    """Run `accel-train meet`; return the exit code."""
    options, config = parse_command_of_recipe(Meet, arguments, "accel-train meet")
    began, seconds = time.monotonic(), config.rendezvous_timeout_seconds
    rank, machines = options.machine_rank, options.num_machines
    hosts = meet_hosts(rank, machines, options.main_process_ip, options.main_process_port, seconds)
    if hosts:
        print_line(f"{machines} machines met within {time.monotonic() - began:.1f} s: {', '.join(hosts)}")
    return 0
