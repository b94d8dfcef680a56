"""How this process was started, and how it meets the other processes."""
