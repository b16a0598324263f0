"""Jobs and steps: the queue, admission, the composition of steps, and their results."""
