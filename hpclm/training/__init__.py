"""A training run: its set-up, the loop, saving, evaluation, metrics and records."""
