"""``hpclm sync``: send a run's missing metrics to its sinks, for runs on nodes without a network."""

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
    other = runs.other_owner(out)
    if other:  # even root would leave files that the owner cannot write
        raise ConfigError(f"{files.shown(out)} belongs to {other}, and only {other} can send its metrics")
    compose.flat_of_run(out)  # ConfigError unless it is a run: the sinks need its settings
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
    options = Parser(prog="hpclm sync", description="Send a run's missing metrics to its sinks (log.sinks).")
    options.add_run()
    other = "a sink to use in place of the run's log.sinks; may be repeated"
    options.add_argument("--sink", action="append", default=[], metavar="NAME", help=other)
    return options
