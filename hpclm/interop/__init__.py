"""Weights from and to other projects' formats: nothing is downloaded, and no code comes with a file."""
