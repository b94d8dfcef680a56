"""`accel-train train`."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path

from accel_train.cli.common import importing
from accel_train.cli.doctor import checks_of_start
from accel_train.data.sources.root import check_root
from accel_train.errors import UnsavedError, UserError, print_line
from accel_train.launch.environment import INTERRUPTED, at_terminal, is_first_process, prepare_environment
from accel_train.launch.parent import record_stop_signal, recorded, stop_signals
from accel_train.launch.process import CODE, start_folder, tell_job_script


def train(arguments: Sequence[str]) -> int:
    """Run `accel-train train`; return the exit code."""
    # From here on a warning is recorded, even one that is ignored, as SIGUSR1 is under the job scripts.
    before = {number: signal.signal(number, record_stop_signal) for number in stop_signals()}
    code = 1
    try:
        code = _train(arguments)
        return code
    except UserError as error:
        code = error.code
        raise
    finally:
        if code or is_first_process():  # launchers turn each code into 1
            tell_job_script(CODE, code)
        for number, handler in before.items():
            signal.signal(number, handler)
        recorded.clear()


def _train(arguments: Sequence[str]) -> int:
    from accel_train.config.options import parse

    start = start_folder()
    job = "" if start is None else start.parent.name
    if arguments and arguments[0].endswith(".jsonl"):
        from accel_train.tools.cluster.submission import words_of_element

        arguments = [*words_of_element(Path(arguments[0]), job), *arguments[1:]]
    config = parse(arguments)
    if job and config.output_dir is None:  # a job that is started again finds its run
        config = dataclasses.replace(config, output_dir=Path("runs", config.recipe, f"job-{job}"))
    if config.config_only:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… --config-only | head` ends quietly
    # Before torch is imported, because torch reads some of these variables.
    launch = prepare_environment(bitwise=config.bitwise)
    finished = config.output_dir is not None and (config.output_dir / "result.json").exists()  # needs no data
    if not config.config_only and not finished and launch.world_size == launch.local_world_size:
        # Processes of several nodes must agree that it is missing: they look for it after they have met.
        check_root(config.data)
    with importing("" if config.config_only else config.recipe):
        from accel_train.launch.agreement import end_world
        from accel_train.train import train, training_plan

    stopped_by: str | None = None
    code = 0
    try:
        if config.config_only:
            text = training_plan(config, launch)
            if launch.rank == 0:
                print(text)
        else:
            result = train(config, launch, checks=checks_of_start(launch.rank))
            stopped_by, code = result.stopped_by, int(result.failed_writes > 0 or result.others_go_on)
            if result.nothing_left and launch.rank == 0:
                print_line(f"{result.directory} holds a finished run: {result / 'result.json'}. Nothing is left to do.")
    except UnsavedError as error:  # the run's console has said why
        stopped_by, code = error.stopped_by, 1
    end_world()
    return INTERRUPTED if stopped_by == "SIGINT" and at_terminal() else code
