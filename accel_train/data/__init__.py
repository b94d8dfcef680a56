"""Data: sources (names -> splits), order (which samples when), augmentation, and loading."""
