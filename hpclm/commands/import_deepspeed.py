"""The verb ``hpclm import-deepspeed``: translate a DeepSpeed JSON into settings of hpclm."""

from pathlib import Path

import yaml

from hpclm import terminal
from hpclm.config import reading
from hpclm.config.deepspeed import nested
from hpclm.config.from_deepspeed import Translation, shown, translated
from hpclm.errors import ConfigError
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm import-deepspeed``."""
    parser = terminal.ArgumentParser(
        prog="hpclm import-deepspeed",
        description="Translate a DeepSpeed JSON into a settings file (YAML). Keys without a setting go into engine.extra; keys "
        "without effect and unknown keys are listed. Exits with 64 if keys contradict each other.",
    )
    parser.add_argument("file", type=Path, help="DeepSpeed's JSON")
    parser.add_argument(
        "--replicas", type=int, help="number of data-parallel replicas, if the JSON does not determine it"
    )
    args = parser.parse_args(argv)
    found = translated(reading.json_object(args.file), args.replicas)
    say(text(found, args.file), end="")
    if found.wrong:
        raise ConfigError([f"{args.file}: {line}" for line in found.wrong])
    return 0


def text(found: Translation, path: Path) -> str:
    """The settings file, and what is not in it."""
    tree = nested(found.settings)
    if found.extra:
        tree["engine"]["extra"] = {key: shown(value) for key, value in found.extra.items()}
    lines = [f"# translated from {terminal.line(path.name)}", yaml.safe_dump(tree, sort_keys=False).rstrip("\n")]
    auto = [", ".join(sorted(found.auto))] if found.auto else []
    for title, what in {
        "left to hpclm's defaults": auto,
        "has no effect here": found.idle,
        "no key of DeepSpeed's": found.unknown,
    }.items():
        lines += [f"# {title}:", *(f"#   {terminal.line(line)}" for line in what)] if what else []
    return "\n".join(lines) + "\n"
