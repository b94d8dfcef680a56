"""A search for good settings with Optuna: several processes share it, and it survives that they are killed.

    python examples/optuna_sweep.py sweeps/digits --trials 20 &    # as many of these as there are GPUs
    python examples/optuna_sweep.py sweeps/digits --trials 20

Each trial is a run of its own in the folder. A trial that is worse than most others at the same epoch ends early.
"""

import argparse
from pathlib import Path

import optuna
from optuna.storages import RDBStorage
from optuna.study import MaxTrialsCallback
from optuna.trial import TrialState

from accel_train.api import train

DONE = (TrialState.COMPLETE, TrialState.PRUNED)


class Pruning:
    """Tells Optuna the validation accuracy of each epoch, and ends the run if Optuna would prune it."""

    must_not_fail = True  # without it the trial would have no value for Optuna

    def __init__(self, trial):
        self.trial, self.pruned = trial, False

    def on_evaluation(self, evaluation):
        if evaluation.split != "val":
            return None
        self.trial.report(evaluation.metrics["accuracy"], evaluation.epoch)
        self.pruned = self.trial.should_prune()
        return "stop" if self.pruned else None


def objective(trial, options):
    settings = {"optim.lr": trial.suggest_float("lr", 1e-3, 1.0, log=True)}
    settings["loss.label-smoothing"] = trial.suggest_float("smoothing", 0.0, 0.2)
    name = trial.user_attrs.get("run", f"trial-{trial.number:03d}")
    trial.set_user_attr("run", name)
    words = [word for option, value in settings.items() for word in (f"--{option}", str(value))]
    words += ["--epochs", str(options.epochs), "--data.val-fraction", "0.2"]
    pruning = Pruning(trial)
    result = train(options.recipe, *words, "--output-dir", str(options.folder / name), observers=[pruning])
    if pruning.pruned and not result.finished:
        raise optuna.TrialPruned
    if not result.finished:  # a signal, or a failed observer: later the trial goes on where it was
        try_again(trial.study, trial)
        trial.study.stop()
        raise RuntimeError(f"stopped by {result.stopped_by}")
    return result.metrics["best_value"]


def try_again(study, trial):
    """Queue a trial that was stopped, or whose process was killed: a new trial, which goes on in the same run."""
    study.enqueue_trial(trial.params, trial.user_attrs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--trials", type=int, default=20, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--heartbeat", type=int, default=60, help="seconds between two signs of life of a process")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    storage = RDBStorage(
        f"sqlite:///{options.folder / 'study.db'}",
        heartbeat_interval=options.heartbeat,
        grace_period=3 * options.heartbeat,
        heartbeat_stale_trial_callback=try_again,
    )
    study = optuna.create_study(
        storage=storage,
        study_name="sweep",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    study.optimize(
        lambda trial: objective(trial, options),
        callbacks=[MaxTrialsCallback(options.trials, states=DONE)],
        catch=(RuntimeError,),
    )
    print("best:", study.best_trial.user_attrs["run"], study.best_value, study.best_params)


if __name__ == "__main__":
    main()
