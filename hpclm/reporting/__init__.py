"""What a run was, for people: a page of curves and attempts, and a live table of runs."""
