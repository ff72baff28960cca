"""The interface for Python. ``import hpclm`` offers its functions and the class Run, and loads them on first use."""
