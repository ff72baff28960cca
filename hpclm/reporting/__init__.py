"""Runs shown to people: a page of curves and attempts, images, and a live table of runs."""
