"""What benchmarks/gpu.py says without a GPU, how it keeps to its time, and that its launchers' lines are accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import pytest

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))

import gpu

SCRIPT = helpers.ROOT / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_without_a_device_nothing_is_claimed(tmp_path: Path) -> None:
    environment = helpers.environment(CUDA_VISIBLE_DEVICES="")
    line = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "out")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert "no CUDA device: torch " in done.stderr and "CUDA_VISIBLE_DEVICES=''" in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


class Clock:
    """A clock that only steps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, seconds: float, error: str = "") -> gpu.Step:
        def run(left: float) -> dict[str, Any]:
            self.now += min(seconds, left)
            if seconds > left:
                raise subprocess.TimeoutExpired(name, left)
            if error:
                raise gpu.StepError(error)
            return {"took": seconds}

        return gpu.Step(name, run)


def test_it_ends_in_time_and_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    clock, store, written = Clock(), tmp_path / "gpu.json", []
    steps = [clock.step("a", 10), clock.step("b", 20, "broken"), clock.step("c", 60), clock.step("d", 5)]
    results = gpu.run_steps(steps, 50, store, lambda done: written.append(set(done)), clock)
    assert clock.now == 50 and list(results) == ["a", "b"] and results["b"]["error"] == "broken"
    assert written == [{"a"}, {"a", "b"}] and json.loads(store.read_text()) == results
    steps[1] = clock.step("b", 20)  # mended meanwhile
    results = gpu.run_steps(steps, 100, store, lambda done: written.append(set(done)), clock)
    assert clock.now == 50 + 20 + 60 + 5  # not those of a
    assert set(results) == {"a", "b", "c", "d"} and results["b"]["took"] == 20


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ('<testcase name="a"><skipped/></testcase>', "no test ran: 1 were skipped"),
        ('<testcase name="a"/><testcase name="b"><failure/></testcase>', "1 of 2 tests failed: b"),
        ('<testcase name="a"><error/></testcase>', "1 of 1 tests failed: a"),
        ("", "no test ran: 0 were skipped"),
    ],
)
def test_tests_that_were_skipped_did_not_pass(tmp_path: Path, cases: str, message: str) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    with pytest.raises(gpu.StepError, match=message):
        gpu.judge_tests(report)
    report.write_text('<testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase></testsuite>')
    assert gpu.judge_tests(report) == {"passed": 1, "skipped": 1}


LINES = {
    "one": (gpu.ONE_PROCESS, gpu.EVERYTHING),
    "one bitwise": (gpu.ONE_PROCESS, [*gpu.SHORT, "--bitwise", "true"]),
    "shared": (gpu.SHARED, [*gpu.SHORT, "--bitwise", "true", "--share-gpus", "true"]),
    "fp16": (("single_gpu.yaml", "--mixed_precision", "fp16"), ["digits"]),
    "fsdp2": (("fsdp2.yaml", "--num_processes", "1"), ["digits"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "words"), LINES.values(), ids=list(LINES))
def test_each_line_comes_as_far_as_the_device(launcher: tuple[str, ...], words: list[str]) -> None:
    """With --config-only the program ends before it asks for a device: a mistake in the launcher's line shows here."""
    line = gpu.launch_line(launcher, "accel_train.train", *words, "--config-only", "true")
    done = subprocess.run(line, env=helpers.environment(), capture_output=True, text=True, cwd=helpers.ROOT)
    assert done.returncode == 0 and "batch_size:" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_steps_work_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ONE_PROCESS", ("cpu.yaml",))
    monkeypatch.setattr(gpu, "SHARED", ("multi_cpu.yaml", "--num_processes", "2"))
    monkeypatch.setattr(gpu, "SHORT", ["digits", "--batch-size", "64", "--epochs", "3"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    same, continued = gpu.compare_bits(tmp_path, 300), gpu.kill_and_continue(tmp_path, 300)
    assert same == continued and same["updates"] == 69
    with pytest.raises(gpu.StepError, match=r"exit code 1: .*--optim\.lr: expected"):
        gpu.trained(tmp_path / "refused", ["digits", "--optim.lr", "-1"], gpu.ONE_PROCESS, 60)
