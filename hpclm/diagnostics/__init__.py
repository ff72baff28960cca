"""Checks of nodes before a run begins, and the report of `hpclm doctor`."""
