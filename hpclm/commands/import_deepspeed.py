"""The verb ``hpclm import-deepspeed``: translate a DeepSpeed JSON into settings of hpclm."""

from pathlib import Path

import yaml

from hpclm import terminal
from hpclm.commands.deepspeed_json import Translation, shown, translated
from hpclm.config import reading
from hpclm.config.deepspeed import nested
from hpclm.errors import ConfigError
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm import-deepspeed``."""
    parser = terminal.ArgumentParser(
        prog="hpclm import-deepspeed",
        description="Translate a DeepSpeed JSON into a settings file (YAML). Keys without a setting go into engine.extra; "
        "the others are listed. Exits with 64 if keys contradict each other.",
    )
    parser.add_argument("file", type=Path, help="DeepSpeed's JSON")
    parser.add_argument(
        "--replicas", type=int, help="number of data-parallel replicas, if the JSON does not determine it"
    )
    args = parser.parse_args(argv)
    translation = translated(reading.json_object(args.file), args.replicas)
    say(text(translation, args.file), end="")
    if translation.wrong:
        raise ConfigError([f"{args.file}: {line}" for line in translation.wrong])
    return 0


def text(translation: Translation, path: Path) -> str:
    """The settings file, and what is not in it."""
    tree = nested(translation.settings)
    if translation.extra:
        tree["engine"]["extra"] = {key: shown(value) for key, value in translation.extra.items()}
    lines = [f"# translated from {terminal.line(path.name)}", yaml.safe_dump(tree, sort_keys=False).rstrip("\n")]
    auto = [", ".join(translation.auto)] if translation.auto else []
    for title, keys in (("left to hpclm's defaults", auto), ("not translated", translation.idle)):
        lines += [f"# {title}:", *(f"#   {terminal.line(line)}" for line in keys)] if keys else []
    return "\n".join(lines) + "\n"
