"""Datasets on disk: reading, writing, verifying, merging, inspecting."""
