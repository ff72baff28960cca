"""Parts of the preflight check: what a process finds on its machine, and what follows from what all of them found."""
