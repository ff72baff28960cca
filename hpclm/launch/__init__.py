"""How the ranks of a run are started: by Slurm, by mpirun, by torchrun's agent on this machine."""
