"""The files of a run, and the right to write them."""
