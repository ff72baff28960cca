"""Where words occur in pages, the best places first."""

import pytest

from hpclm.documentation import search

PAGES = {
    "first": "# Saving\n\nA checkpoint is saved.\n\n## How often\n\nEvery checkpoint has its step; a Checkpoint is a folder.\n",
    "second": "# Checkpoints\n\nNothing here.\n",
    "third": "# Other\n\n```\n# checkpoint of a shell\n```\n\nThe end; recheckpointing is no word of it.\n",
    "fourth": "# Saving a checkpoint\n\nAt each step.\n",
}


@pytest.fixture
def places(tmp_path):
    for name, text in PAGES.items():
        (tmp_path / name).write_text(text)
    return lambda *words: search.places(words, {name: tmp_path / name for name in PAGES})


def test_pages_with_the_word_in_their_title_come_first_and_those_with_more_of_it_before_others(places):
    found = places("checkpoint")
    assert [(place.page, place.count) for place in found] == [("second", 1), ("fourth", 1), ("first", 3), ("third", 1)]
    by_name = {place.page: place for place in found}
    assert (by_name["first"].title, by_name["first"].line) == ("Saving", "A checkpoint is saved.")
    assert (
        places("folder")[0].heading == "How often" and by_name["first"].heading == ""
    )  # the title, which is shown anyway
    assert by_name["third"].heading == "" and by_name["third"].line == "checkpoint of a shell"


def test_pages_with_all_words_come_alone_and_without_any_those_with_some(places):
    assert {place.page for place in places("checkpoint", "step")} == {"first", "fourth"}
    assert {place.page for place in places("folder", "shell")} == {"first", "third"}
    assert places("nothing-of-that-kind") == []


def test_a_long_line_is_cut_around_the_word():
    line = "a" * 150 + " word " + "b" * 150
    shown = search._around(line, search.patterns(["word"]))
    assert len(shown) <= search.WIDTH and " word " in shown and shown[0] == shown[-1] == "…"
    assert shown.index("word") == search.WIDTH // 3 + 1  # and as much again and more after it
    assert search._around("word " + "b" * 99, search.patterns(["word"])).startswith("word b")
    assert search._around("b" * 99 + " word", search.patterns(["word"])).endswith("b word")
    assert search._around("x" * search.WIDTH, search.patterns(["word"])) == "x" * search.WIDTH
