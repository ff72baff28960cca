"""``python -m hpclm.config`` is ``hpclm config``."""

from hpclm import cli
from hpclm.config import show

raise SystemExit(cli.run(show.main))
