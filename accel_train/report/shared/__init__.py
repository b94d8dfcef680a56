"""What both pages are made of: the files of a run, charts, templates."""
