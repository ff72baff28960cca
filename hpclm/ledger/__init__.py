"""Which samples and documents each step of a run has read."""
