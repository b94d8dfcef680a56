"""The options of a run: their names, types, bounds and recipes, and which of them may change later."""
