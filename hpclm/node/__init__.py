"""One machine, and the processes that run on it."""
