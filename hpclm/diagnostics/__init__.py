"""Checks of nodes before a run begins, and what `hpclm doctor` shows."""
