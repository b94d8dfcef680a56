"""Commands that only tell something: what runs there are, what can be typed."""
