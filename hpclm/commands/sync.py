"""``hpclm sync``: send a run's sinks the metrics they lack; for runs on nodes without a network."""

from pathlib import Path

from hpclm import failures, files
from hpclm.config import compose
from hpclm.errors import ConfigError, HpclmError
from hpclm.parser import Parser
from hpclm.rundir import runs
from hpclm.sinks import lookup
from hpclm.sinks.feed import Feed, cause, place
from hpclm.terminal import say


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
    each = failures.PerRunErrors(len(names))
    for name in names:
        with each:
            sync(out, name)
    return each.code


def parser() -> Parser:
    """The parser of ``hpclm sync``."""
    options = Parser(prog="hpclm sync", description="Send the metrics that the sinks of a run (log.sinks) lack.")
    options.add_run()
    options.add_runs_folder()
    options.add_argument(
        "--sink", action="append", metavar="NAME", help="another sink than those of the run; repeatable"
    )
    return options


def sync(out: Path, name: str) -> None:
    """Send all rows that the sink ``name`` lacks; HpclmError if it fails."""
    lookup(name)
    with files.locked(place(out, name, "lock"), f"waiting for the process of {out} that sends to {name}"):
        feed = Feed(name, out)
        before, refused = feed.rows, feed.refused
        try:
            feed.send(lambda text: say(f"{name}: {text}"))
        except Exception as error:
            raise HpclmError(f"{name}: {cause(error).rstrip('.')}; repeat the command to send the rest") from None
        feed.close(0)
    step = max(feed.steps.values(), default=0)
    lost = feed.refused - refused
    all_rows = f"everything but {feed.refused} refused rows" if feed.refused else "everything"
    say(f"{name}: {feed.rows - before - lost} rows sent; it has {all_rows} up to step {step}")
