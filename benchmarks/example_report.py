"""Make docs/example_report.html, the report of a real run of digits with a validation split.

`make docs` starts it if the file is missing: python benchmarks/example_report.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "example_report.html"
RUN = "runs/digits"  # relative, so that the page names no folder of this machine
COMMANDS = (
    f"train digits --epochs 12 --data.val-fraction 0.1 --output-dir {RUN}",
    f"evaluate {RUN}",
    f"report {RUN}",
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            subprocess.run([sys.executable, "-m", "accel_train", *command.split()], cwd=folder, check=True)
        shutil.copyfile(Path(folder, RUN, "report.html"), PAGE)
    print(f"{PAGE}: {PAGE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
