"""The mesh of processes, and what they say to each other while they compute."""
