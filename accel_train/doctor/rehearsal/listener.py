"""`python -m accel_train.doctor.rehearsal.listener FOLDER`: a process that only waits for SIGUSR1, and says so there.

It creates FOLDER/ready-RANK, then FOLDER/heard-RANK when the signal comes, and then ends.
"""

import os
import signal
import sys
from pathlib import Path

SECONDS = 60.0


def main(folder: Path) -> int:
    """Wait for the signal; the exit code is 1 if it does not come."""
    rank = os.environ.get("RANK", "0")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # waits for the call below, if it comes before
    (folder / f"ready-{rank}").touch()
    if signal.sigtimedwait({signal.SIGUSR1}, SECONDS) is None:
        return 1
    (folder / f"heard-{rank}").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
