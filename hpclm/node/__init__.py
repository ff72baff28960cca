"""What a machine has, and what runs on it."""
