"""The page that compares several runs."""
