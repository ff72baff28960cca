"""``hpclm demo``: corpus, tokenizer, dataset, a training run that is stopped half-way and continued, and its text."""

from hpclm.launch.demo import FOLDER, demonstrate
from hpclm.node import environment
from hpclm.parser import Parser


def main(settings: list[str]) -> int:
    """Run the demonstration with these settings."""
    run = environment.settings_with_site(["demo", *settings])  # mistakes are reported before anything is written
    return demonstrate(run, settings)


def parser() -> Parser:
    """The parser of ``hpclm demo``."""
    options = Parser(
        prog="hpclm demo",
        description=f"Train a small GPT on the source code of Python's standard library, in the folder {FOLDER}/: a few minutes on "
        "two CPU cores. Nothing is downloaded. The same command continues where it was stopped.",
    )
    options.add_settings("settings of the training: budget.steps=100")
    return options
