"""The verb ``hpclm import-deepspeed``: a DeepSpeed JSON as settings of hpclm."""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from hpclm import cli
from hpclm.config.deepspeed import nested
from hpclm.config.found import Found, shown
from hpclm.config.from_deepspeed import translated
from hpclm.errors import ConfigError


def main(argv: list[str]) -> int:
    """``hpclm import-deepspeed``."""
    parser = argparse.ArgumentParser(
        prog="hpclm import-deepspeed",
        description="Print the settings that a DeepSpeed JSON stands for, as YAML: what no setting covers is in engine.extra, "
        "what has no effect or is unknown is listed. Ends with 64 when something contradicts.",
    )
    parser.add_argument("file", type=Path, help="DeepSpeed's JSON")
    parser.add_argument("--replicas", type=int, help="data-parallel replicas, where the JSON does not tell how many")
    args = parser.parse_args(argv)
    found = translated(read(args.file), args.replicas)
    print(text(found, args.file), end="")
    if found.wrong:
        raise ConfigError([f"{args.file}: {line}" for line in found.wrong])
    return 0


def read(path: Path) -> dict[str, Any]:
    """The JSON's sections; ConfigError where it is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold an object, not a {type(tree).__name__}")
    return tree


def text(found: Found, path: Path) -> str:
    """The settings file, and what is not in it."""
    tree = nested(found.settings)
    if found.extra:
        tree["engine"]["extra"] = {key: shown(value) for key, value in found.extra.items()}
    lines = [f"# what {path.name} stands for", yaml.safe_dump(tree, sort_keys=False).rstrip("\n")]
    auto = [", ".join(sorted(found.auto))] if found.auto else []
    for title, what in {
        "left to hpclm's defaults": auto,
        "has no effect here": found.idle,
        "no key of DeepSpeed's": found.unknown,
    }.items():
        lines += [f"# {title}:", *(f"#   {line}" for line in what)] if what else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
