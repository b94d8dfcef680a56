"""Where images and labels come from."""
