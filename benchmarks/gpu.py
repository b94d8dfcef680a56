"""Run on a GPU what has been seen on CPUs only: training, bits, a kill, the tests marked gpu, and the speed of recipes.

    python benchmarks/gpu.py --seconds 480      # as far as that time reaches; the same command goes on afterwards
    python benchmarks/gpu.py --skip-tests

It needs no network, and no data but the package's. The steps that tell the most come first. After each step the folder
OUTPUT has all results so far in gpu.json, and the table for docs/benchmarks.md in gpu.md. A step that has a result
there is not repeated. Without a CUDA device the script ends with 2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("cifar10_fast", "mnist_cnn", "cifar10_resnet18_sota", "imagenet_resnet50")
EVERYTHING = """
digits --augment.crop random --augment.pad 1 --augment.flip 0.5 --augment.erase 0.2 --augment.mixup 0.2
--model.name resnet18_cifar --model.image-size 32 --optim.clip 1 --ema.enabled true --epochs 3
""".split()  # noqa: SIM905
SHORT = "digits --model.name resnet18_cifar --model.image-size 32 --batch-size 64 --epochs 2".split()  # noqa: SIM905
ONE_PROCESS = ("single_gpu.yaml",)
# Not --gpu_ids 0: accelerate refuses one id for two processes before it asks for a GPU.
SHARED = ("multi_gpu.yaml", "--num_processes", "2")


class StepError(Exception):
    """What a step has seen go wrong, in one line."""


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[float], dict[str, Any]]
    """Given the seconds that are left, returns the figures. Raises StepError or subprocess.TimeoutExpired."""


def main() -> int:
    """Return 0 if every step is done and none failed, 1 if one failed or is not done, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="end after this time (default: 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", help="folder (default: runs/gpu)")
    parser.add_argument("--skip-tests", action="store_true", help="do not run the tests marked gpu")
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="recipes to measure, on synthetic images")
    parser.add_argument("--precision", default="bf16", choices=("no", "bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if reason := no_device():
        print(f"benchmarks/gpu.py: {reason}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    steps = create_steps(options)
    results = run_steps(steps, options.seconds, options.output / "gpu.json", lambda done: write_page(options, done))
    print((options.output / "gpu.md").read_text())
    missing = [step.name for step in steps if step.name not in results]
    failed = [name for name, result in results.items() if "error" in result]
    if missing:
        print(f"Not done in {options.seconds:.0f} s: {', '.join(missing)}. The same command goes on with them.")
    print(f"Results: {options.output / 'gpu.json'} and gpu.md; {len(failed)} of {len(results)} steps failed.")
    return 1 if missing or failed else 0


def no_device() -> str:
    """Why nothing can be run here; "" if torch finds a CUDA device."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch; install accel_train, or name another Python: make gpu PYTHON=python3.12"
    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if seen is None else f"; CUDA_VISIBLE_DEVICES={seen!r}"
    driver = "" if shutil.which("nvidia-smi") else ", and there is no nvidia-smi"
    return f"no CUDA device: torch {torch.__version__} ({built}) finds none{driver}{hidden}. Nothing was run."


def run_steps(
    steps: Sequence[Step],
    seconds: float,
    store: Path,
    written: Callable[[dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the steps that have no result in the file `store` yet, until `seconds` are over; return all results.

    After each step `store` is replaced and `written(results)` is called. A step that fails has the result {"error":
    …} and is tried again by the next call; one that was cut by the end of the time has none.
    """
    results: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    results = {name: result for name, result in results.items() if "error" not in result}
    end = clock() + seconds
    for step in steps:
        left = end - clock()
        if step.name in results:
            continue
        if left <= 0:
            break
        print(f"{step.name} …", flush=True)
        began = clock()
        try:
            results[step.name] = step.run(left)
        except subprocess.TimeoutExpired:
            break
        except StepError as error:
            results[step.name] = {"error": str(error)}
        results[step.name]["seconds"] = round(clock() - began, 1)
        print(f"{step.name}: {results[step.name]}", flush=True)
        part = store.with_suffix(".part")
        part.write_text(json.dumps(results, indent=1) + "\n")
        part.replace(store)
        written(results)
    return results


def create_steps(options: argparse.Namespace) -> list[Step]:
    """The steps, those that tell the most first."""
    folder: Path = options.output
    speed = [Step(f"speed of {name}", partial(measure, name, options)) for name in options.recipes]
    tests = [] if options.skip_tests else [Step("tests marked gpu", lambda left: run_tests(folder, left))]
    return [
        Step("machine", lambda left: machine()),
        Step("digits with everything", lambda left: trained(folder / "everything", EVERYTHING, ONE_PROCESS, left)),
        *speed[:1],
        Step("same bits on two processes", lambda left: compare_bits(folder, left)),
        Step("killed and continued", lambda left: kill_and_continue(folder, left)),
        *tests,
        *speed[1:],
    ]


def launch_line(launcher: Sequence[str], *words: str) -> list[str]:
    """`accelerate launch` with a config file of accelerate_configs/ and the launcher's options."""
    config, *more = launcher
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/accelerate_configs/{config}"]
    return [*line, *more, "-m", *words]


def machine() -> dict[str, Any]:
    """What is measured, with which versions, and who computes BatchNorm of several virtual batches."""
    import document
    import torch

    from accel_train.models.batchnorm_kernels import why_not_fused

    reason = why_not_fused(torch.device("cuda", 0))
    batchnorm = f"torch's operators, because Triton's kernels do not work here: {reason}" if reason else "Triton"
    return {**document.circumstances("python benchmarks/gpu.py " + " ".join(sys.argv[1:])), "batchnorm": batchnorm}


def call(line: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, without a network; raise StepError with the program's last line if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        said = done.stderr.partition("Traceback (most recent call last)")[0].strip()  # what follows is the launcher's
        last = (said or done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise StepError(f"exit code {done.returncode}: {last}")
    return done


def trained(run: Path, words: Sequence[str], launcher: Sequence[str], seconds: float) -> dict[str, Any]:
    """Train in a new directory; return figures of result.json, and the SHA-256 of the weights."""
    shutil.rmtree(run, ignore_errors=True)
    call(launch_line(launcher, "accel_train.train", *words, "--output-dir", str(run)), seconds)
    return figures_of(run)


def figures_of(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    weights = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()[:16]
    return {name: result[name] for name in ("updates", "test_accuracy", "test_loss")} | {"weights": weights}


def compare_bits(folder: Path, seconds: float) -> dict[str, Any]:
    """Train with --bitwise true on one process and on two that share the GPU; raise StepError if the weights differ."""
    end = time.monotonic() + seconds
    words = [*SHORT, "--bitwise", "true"]
    one = trained(folder / "one", words, ONE_PROCESS, seconds)
    two = trained(folder / "two", [*words, "--share-gpus", "true"], SHARED, end - time.monotonic())
    if one["weights"] != two["weights"]:
        raise StepError(f"the weights differ: test loss {one['test_loss']} on one process, {two['test_loss']} on two")
    return one


def kill_and_continue(folder: Path, seconds: float) -> dict[str, Any]:
    """Kill a run with SIGKILL after a checkpoint, continue it, and compare it with the run that was not killed."""
    end = time.monotonic() + seconds
    words = [*SHORT, "--bitwise", "true", "--checkpoint.every-updates", "5"]
    whole = trained(folder / "whole", words, ONE_PROCESS, seconds)
    run = folder / "killed"
    shutil.rmtree(run, ignore_errors=True)
    line = launch_line(ONE_PROCESS, "accel_train.train", *words, "--output-dir", str(run))
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while not any(run.glob("checkpoints/update-*/state.json")):
            if process.poll() is not None:
                raise StepError(f"the run to be killed ended by itself, with exit code {process.returncode}")
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(line, seconds)
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    call(line, end - time.monotonic())
    continued = figures_of(run)
    if continued["weights"] != whole["weights"]:
        raise StepError(f"the weights differ: test loss {whole['test_loss']}, continued {continued['test_loss']}")
    return continued


def run_tests(folder: Path, seconds: float) -> dict[str, Any]:
    """Run the tests marked gpu; raise StepError if one fails or none ran."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    line = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", "tests/integration/test_gpu.py"]
    try:
        call(line, seconds)
    except StepError as error:
        if not report.exists():
            raise StepError(f"pytest: {error}") from error
    return judge_tests(report)


def judge_tests(report: Path) -> dict[str, Any]:
    """The numbers of tests in pytest's JUnit file; raises StepError if a test failed or none ran."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    ran = [case for case in cases if case.find("skipped") is None]
    if failed:
        raise StepError(f"{len(failed)} of {len(ran)} tests failed: {', '.join(map(str, failed))}")
    if not ran:
        raise StepError(f"no test ran: {len(cases)} were skipped")
    return {"passed": len(ran), "skipped": len(cases) - len(ran)}


def measure(recipe: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Images a second of the recipe's trainer and of the device's limit, on synthetic images."""
    from trainer import data_words  # imports torch

    file = options.output / f"{recipe}.json"
    words = ["accel_train", "bench", recipe, *data_words(recipe, None)]
    words += ["--rounds", str(options.rounds), "--output", str(file)]
    launcher = ("single_gpu.yaml", "--mixed_precision", options.precision)
    call(launch_line(launcher, *words), seconds)
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def write_page(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write the table so far, for docs/benchmarks.md."""
    import document

    rows = []
    for name in options.recipes:
        figures = results.get(f"speed of {name}", {})
        if "ratios" in figures:
            speed, share = figures["images_per_second"], figures["ratios"]["trainer/limit"]
            row = [f"{name}, batch {figures['batch_size']}, {figures['precision']}"]
            row += [f"{speed[kind]['median']:,.0f}" for kind in ("limit", "trainer")]
            rows.append([*row, f"{share['median']:.3f} ({share['low']:.3f} to {share['high']:.3f})"])
    head = ["recipe, synthetic images", "limit: images/s", "trainer: images/s", "trainer / limit (quartiles)"]
    checks = [f"* {name}: {result.get('error', 'as it must be')}" for name, result in results.items()]
    lines = [*document.table(head, rows), "", f"Medians of {options.rounds} rounds.", *checks]
    if "batchnorm" in results.get("machine", {}):
        lines.append(f"* BatchNorm over virtual batches: {results['machine']['batchnorm']}")
    if "command" in results.get("machine", {}):
        lines += ["", document.caption(results["machine"])]
    (options.output / "gpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
