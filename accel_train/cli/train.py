"""`accel-train train`."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from accel_train.cli.common import importing
from accel_train.errors import UnsavedError
from accel_train.launch.environment import prepare_environment
from accel_train.launch.signals import recording_stop_signals


def train(arguments: Sequence[str]) -> int:
    """Run `accel-train train`; return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        from accel_train.cli.info.help import train_help

        train_help(arguments)
        return 0
    with recording_stop_signals():
        from accel_train.config.options import parse

        config = parse(arguments)
        if config.config_only:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… --config-only | head` ends quietly
        # Before torch is imported, because torch reads some of these variables.
        launch = prepare_environment(bitwise=config.bitwise)
        with importing("" if config.config_only else config.recipe):
            from accel_train.launch.accelerator import end_world
            from accel_train.train import train

        try:
            code = train(config, launch)
        except UnsavedError as error:  # the run's console has said why
            code = error.code
        end_world()
        return code
