"""The page of what a model will see, before it is trained."""
