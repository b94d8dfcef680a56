"""Data sets of image files: folders, tables and tar files."""
