"""From the stored images to the input of the model."""
