"""The verb ``hpclm save-now``: let a run save after the step it is in, and go on."""

from hpclm import cli
from hpclm.job import order


def main(argv: list[str]) -> int:
    """``hpclm save-now``."""
    parser = order.parser("save-now", "Let a run that trains save after the step it is in. It goes on.")
    args = parser.parse_args(argv)
    if order.give("save-now", args.run, args.runs, args.wait):
        print(f"saving; see: hpclm checkpoints {args.run}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
