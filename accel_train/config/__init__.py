"""The settings of a run: their names, values, recipes, and which of them may change."""
