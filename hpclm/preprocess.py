"""``python -m hpclm.preprocess`` is ``hpclm preprocess``."""

from hpclm import cli
from hpclm.data import preprocess

if __name__ == "__main__":  # workers import this module too
    raise SystemExit(cli.run(preprocess.main))
