"""Datasets on disk: read, written, checked, joined, shown."""
