"""Test a user's own code: a toy model trains with it in several layouts, and must learn the same in each (``run.py``)."""
