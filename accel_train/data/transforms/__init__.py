"""From stored images to the model's input."""
