"""The mesh of processes, and their communication during computation."""
