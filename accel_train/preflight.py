"""Check the processes of a launcher before a long run: `accelerate launch … -m accel_train.preflight [DIRECTORY]`.

The quick part of `accel-train doctor`, with the recipe digits: can the processes connect, do they run the same program,
do they share DIRECTORY, how fast do they add up their gradients? The exit code is 2 if a check fails.
"""

from __future__ import annotations

import sys

from accel_train.cli.doctor import print_diagnosis
from accel_train.config.options import parse
from accel_train.errors import UserError, print_line, print_logged
from accel_train.launch.environment import prepare_environment


def main(arguments: list[str]) -> int:
    """Print what the checks find; return the exit code, which is 2 if one fails."""
    print_logged()
    try:
        launch = prepare_environment()  # before torch is imported, because torch reads some of these variables
        batch = launch.world_size * max(1, 64 // launch.world_size)
        words = ["digits", "--batch-size", str(batch), "--rendezvous-timeout-seconds", "120"]
        config = parse([*words, *(["--output-dir", arguments[0]] if arguments else [])])
        from accel_train.doctor.doctor import doctor

        diagnosis = doctor(launch, config, quick=True)
    except UserError as error:
        print_line(f"preflight failed: {error}", sys.stderr)
        return 2
    if launch.rank == 0:
        print_diagnosis(diagnosis)
        print_line("preflight failed" if diagnosis.failed else "preflight passed")
    return 2 if diagnosis.failed else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    from accel_train.launch.agreement import end_world

    end_world()
    sys.exit(code)
