"""The interface for Python: functions.py has what ``import hpclm`` offers, loaded when it is used, and run.py the class Run."""
