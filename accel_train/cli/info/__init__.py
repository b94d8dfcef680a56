"""What can be typed: the help of train, completion in a shell."""
