"""A command line of another trainer as a recipe: `accel-train convert`."""
