"""``python -m hpclm VERB`` is ``hpclm VERB``."""

from hpclm.cli import entry

entry()
