"""Tests a user's own code: a toy trains with it in several layouts, and must learn the same in each (``run.py``)."""
