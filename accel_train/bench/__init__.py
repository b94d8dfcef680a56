"""How fast a recipe trains, and what limits it."""
