"""Commands that tell about a recipe before it is trained."""
