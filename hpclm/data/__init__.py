"""Text to tokens to samples to batches."""
