"""A document's sentences, by the library sentencex, which is imported when it is used."""

import re

SPACE = re.compile(r"\s*")


def sentences(text: str, language: str) -> list[str] | None:
    """The sentences of ``text``, each with the white space after it; joined they are the text.

    None where the library's sentences are not the text's own words, in the same order.
    """
    from sentencex import segment

    found: list[str] = []
    for piece in segment(language, text):
        lead = SPACE.match(piece)
        space = len(lead[0]) if lead and found else 0  # white space belongs to the sentence before
        if space:
            found[-1] += piece[:space]
        if piece[space:]:
            found.append(piece[space:])
    return found if "".join(found) == text else None
