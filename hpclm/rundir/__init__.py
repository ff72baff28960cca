"""What a run leaves on disk, and who may write it."""
