"""Two models image by image: what each answered, and where they differ."""
