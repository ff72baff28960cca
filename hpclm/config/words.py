"""What was meant by words of a command line that are neither key=value nor a settings file."""

import re
from collections.abc import Iterator, Sequence

from hpclm.config.fields import type_of

KEY = re.compile(r"[A-Za-z_][\w.-]*")
UNIT = re.compile(r"([KMGT])(i?B)?", re.IGNORECASE)


def mistakes(words: Sequence[str], typed: Sequence[str]) -> Iterator[str]:
    """What is wrong with ``words``, which should be settings files, on the command line ``typed``; nothing if it is unclear."""
    told: set[str] = set()
    for place, word in enumerate(typed):
        before, after = (typed[place - 1] if place else "", typed[place + 1] if place + 1 < len(typed) else "…")
        setting, _, value = word.partition("=")
        if word in told:
            continue
        if setting == "" and KEY.fullmatch(before) and "=" in word:
            yield f"write {before}={value or after}, without spaces"
            told |= {before, after} if not value else {before}
        elif value == "" and word.endswith("=") and KEY.fullmatch(setting) and after in words:
            yield f"write {word}{after}, without a space"
            told.add(after)
        elif UNIT.fullmatch(word) and re.search(r"(^|=)\d+$", before):
            option = f"{typed[place - 2]} " if before.isdigit() and place > 1 else ""
            yield f"write {option}{before}{word[0].upper()}, in one word"
        elif word in words and type_of(word) is not None and not after.startswith("="):
            yield f"{word} has no value: {word}=…"
