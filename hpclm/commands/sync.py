"""``hpclm sync``: send a run's sinks the metrics they lack; for runs on nodes without a network."""

from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.config import compose
from hpclm.node import failures
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.sinks.feed import send_rest


def main(run: str, runs_folder: Path, sink: list[str]) -> int:
    """Send the metrics to each sink; a failure of one does not affect the others."""
    out = runs.resolve(run, runs_folder)
    if other := runs.other_owner(out):  # even root would leave files there that its owner cannot write
        raise ConfigError(f"{files.shown(out)} belongs to {other}, and only {other} can send its metrics")
    compose.flat_of_run(out)  # every sink gets the settings
    names = sink or compose.of_run(out, []).log.sinks
    if not names:
        raise ConfigError(f"{out} has no log.sinks; name one: hpclm sync {files.typed(run)} --sink wandb")
    per_sink = failures.PerRunErrors(len(names))
    for name in names:
        with per_sink:
            send_rest(out, name)
    return per_sink.code


def parser() -> Parser:
    """The parser of ``hpclm sync``."""
    options = Parser(prog="hpclm sync", description="Send the metrics that the sinks of a run (log.sinks) lack.")
    options.add_run()
    other = "another sink than those of the run; repeatable"
    options.add_argument("--sink", action="append", default=[], metavar="NAME", help=other)
    return options
