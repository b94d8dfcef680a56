"""What the pages call a figure."""

from __future__ import annotations

SPLITS = {"train": "training", "val": "validation", "test": "test"}
FIGURES = {
    "map": "mean average precision",
    "micro_map": "micro average precision",
    "top5_accuracy": "top-5 accuracy",
    "f1": "macro F1",
    "micro_f1": "micro F1",
    "all labels right": "images with all labels right",
}


def figure_title(name: str) -> str:
    """Such as "top-5 accuracy" for "top5_accuracy"."""
    return FIGURES.get(name, name.replace("_", " "))
