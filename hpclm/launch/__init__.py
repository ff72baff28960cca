"""Start the ranks of a run with Slurm, with mpirun, or with torchrun's agent on this machine."""
