"""What the page of a report says in words."""

import re

from hpclm.reporting import page
from hpclm.reporting.history import read_history
from hpclm.reporting.standings import Standing
from tests.reporting import made


def words(markup):
    return re.sub("<[^>]*>", "", markup)


def standing(name, best=None, training=2.5, diverged=None):
    return Standing(name, best, best and 7, training, 50, diverged)


def test_the_verdict_names_the_best_run_those_that_diverged_and_what_makes_losses_incomparable():
    runs = [standing("a", 2.25), standing("b", 2.5), standing("c", diverged=30, training=None)]
    assert (
        words(page._verdict(runs, {}))
        == "a has the lowest validation loss, 2.2500 nats per token. 1 of 3 diverged: c at step 30."
    )
    assert words(page._verdict(runs[1:2], {"optim.lr": {}, "data.prefix": {}})) == (
        "b has the lowest validation loss, 2.5000 nats per token. They differ in data.prefix, so their losses may not be comparable."
    )
    assert words(page._verdict([standing("d")], {})) == "d has the lowest training loss, 2.5000 nats per token."
    assert words(page._verdict([standing("c", diverged=3)], {})) == "1 of 1 diverged: c at step 3."


def test_a_run_stands_as_its_files_say_or_as_it_diverged(tmp_path):
    history = read_history(made.trained(tmp_path / "a", [3.0, 2.0]))
    assert words(page._state(history, standing("a"))) == "running, according to its files"
    assert page._state(history, standing("a", diverged=2)).startswith('<span class="warn"')
    assert words(page._state(history, standing("a", diverged=2))) == "diverged at step 2"


def test_what_a_model_wrote_is_shown_or_that_it_is_nothing_to_be_seen():
    assert page._sample("<b> so") == "<pre>&lt;b&gt; so</pre>"
    assert [words(page._sample(text)) for text in (" \n", "")] == ["wrote only white space", "ended at once"]


def test_settings_below_a_name_are_at_most_eight_and_the_rest_is_counted():
    shown = page._beside({f"s{number}": str(number) for number in range(page.BESIDE + 2)})
    assert words(shown).startswith("s0=0s1=1") and words(shown).endswith("and 2 more")
    assert "more" not in page._beside({"s": "1"}) and page._beside({}) == ""
