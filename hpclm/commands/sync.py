"""``hpclm sync``: send a run's sinks the metrics they lack; for runs on nodes without a network."""

from hpclm import failures, files
from hpclm.config import compose
from hpclm.errors import ConfigError
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.sinks.feed import send_rest


def main(argv: list[str]) -> int:
    """``hpclm sync``."""
    args = parser().parse_args(argv)
    out = runs.resolve(args.run, args.runs)
    if other := runs.other_owner(out):  # even root would leave files there that its owner cannot write
        raise ConfigError(f"{files.shown(out)} belongs to {other}, and only {other} can send its metrics")
    compose.flat_of_run(out)  # every sink gets the settings
    names = args.sink or compose.of_run(out, []).log.sinks
    if not names:
        raise ConfigError(f"{out} has no log.sinks; name one: hpclm sync {files.typed(args.run)} --sink wandb")
    per_sink = failures.PerRunErrors(len(names))
    for name in names:
        with per_sink:
            send_rest(out, name)
    return per_sink.code


def parser() -> Parser:
    """The parser of ``hpclm sync``."""
    options = Parser(prog="hpclm sync", description="Send the metrics that the sinks of a run (log.sinks) lack.")
    options.add_run()
    options.add_runs_folder()
    options.add_argument(
        "--sink", action="append", metavar="NAME", help="another sink than those of the run; repeatable"
    )
    return options
