"""The verb ``hpclm stop``: let a run save after the step it is in, and end."""

from hpclm import cli
from hpclm.job import order


def main(argv: list[str]) -> int:
    """``hpclm stop``."""
    parser = order.parser(
        "stop",
        "Let a run that trains save after the step it is in, and end with exit code 0: Slurm does not start it again. Works "
        "from any machine that sees the run directory; 'hpclm cancel' also ends what waits or hangs. 'hpclm resume' goes on.",
    )
    args = parser.parse_args(argv)
    if order.give("stop", args.run, args.runs, args.wait):
        print(f"saved and ended; go on with: hpclm resume {args.run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
