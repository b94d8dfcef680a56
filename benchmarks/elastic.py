"""Kill one of three agents of torchrun, with its process, and measure what this costs the run.

    python benchmarks/elastic.py                       # accel_train and Lightning, some minutes; prints a table
    python benchmarks/elastic.py --rdzv-conf ""        # with torchrun's own times
    python benchmarks/elastic.py --programs Lightning --tries 5

Each program trains the net of interrupted/observed.py, which writes down each update, and saves every 10 updates. After
45 updates the third agent is killed (SIGKILL). Seconds are counted from then to the end of the first update of the two
that are left, and of them those until the launcher has started the processes again; updates repeated are those that the
kill has lost. Composer is not here: it needs an older torch (below 2.7.1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tasks
import torture
import turns
from interrupted import observed

from accel_train.cli.table import print_table
from accel_train.launch.process import hostname

AGENTS, KILL_AFTER = 3, 45
TIMES = "last_call_timeout=5,keep_alive_interval=2"
TIMEOUT = 300  # seconds of a try
PROGRAMS = {
    "accel_train": torture.accel_train()(1, Path("RUN")),
    "accel_train, bitwise": torture.accel_train("--bitwise", "true")(1, Path("RUN")),
    "Lightning": [torture.HERE / "with_lightning.py", "--folder", "RUN"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=[*PROGRAMS], default=[*PROGRAMS])
    parser.add_argument("--tries", type=int, default=3, help="default: 3; the table shows medians and the range")
    parser.add_argument("--rdzv-conf", default=TIMES, help=f"torchrun's; default: {TIMES}")
    options = parser.parse_args()
    head = ["", "updates repeated", "seconds to the next update", "of them the launcher's"]
    rows = []
    for name in options.programs:
        if name == "Lightning" and not tasks.has_lightning():
            print("Lightning is not installed: not measured")
            continue
        found = [measure(PROGRAMS[name], options.rdzv_conf) for _ in range(options.tries)]
        rows.append([name, *(text(column) for column in zip(*found, strict=True))])
        print_table(head, rows)
    print(f"{hostname()}, {options.tries} tries, --rdzv-conf={options.rdzv_conf or '(none)'}")


def text(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def measure(words: list[object], times: str) -> tuple[float, float, float]:
    """Return the updates that are repeated, the seconds to the next update, and of them those of the launcher."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher = "-m torch.distributed.run --nnodes=1:3 --nproc-per-node=1 --max-restarts=10 --rdzv-backend=c10d"
        line: list[object] = [*launcher.split(), f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
        line += [f"--rdzv-conf={times}"] * bool(times)
        line += [folder / "run" if word in ("RUN", Path("RUN")) else word for word in words]
        variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {observed.LOG: name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        agents = []
        for number in range(AGENTS):
            agents.append(turns.Program(line, folder / f"agent-{number}.log", variables))
            stack.callback(agents[-1].end)
            time.sleep(3 * (number == 0))  # the first one is the host
        wait(agents, lambda: done(folder)[-1:] >= [KILL_AFTER] and ranks(folder) == AGENTS)
        before, killed = len(starts(folder)), time.time()
        agents[-1].end()
        wait(agents, lambda: len(starts(folder)) > before and done(folder))
        seconds = time.time() - killed
        again = max(child.create_time() for agent in agents[:-1] for child in agent.process.children())
        *earlier, last = starts(folder)
        lost = [step["after"] for step in earlier[-1][1:]][::-1].index(last[0]["before"])
        return lost, seconds, again - killed


def wait(agents: list[turns.Program], happened: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not happened():
        if time.monotonic() > deadline or agents[0].process.poll() is not None:
            raise SystemExit(f"It did not happen:\n{agents[0].log.read_text()[-3000:]}")
        time.sleep(0.02)


def starts(folder: Path) -> list[list[dict[str, Any]]]:
    """The records of rank 0, by start: the first line of each has the weights "before", the others those "after"."""
    found: list[list[dict[str, Any]]] = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "rank0.jsonl").read_text().splitlines(keepends=True):
            values = json.loads(line) if line.endswith("\n") else {}
            if "before" in values:
                found.append([])
            if found and values.keys() & {"before", "done"}:
                found[-1].append(values)
    return found


def done(folder: Path) -> list[int]:
    """The numbers of the updates that the newest start has done."""
    return [step["done"] for step in (starts(folder) or [[]])[-1][1:]]


def ranks(folder: Path) -> int:
    """On how many processes the newest start trains: each writes a file of its own."""
    return len(list(folder.glob("rank*.jsonl")))


if __name__ == "__main__":
    main()
