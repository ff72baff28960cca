"""What is scored of documents, and how scores are printed."""

import math

import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.base.progress import Bar
from hpclm.config import load
from hpclm.inference import run_model, scoring
from hpclm.inference.evaluation import TaskScores
from hpclm.inference.scoring import Document, Window
from hpclm.parallel.mesh import Compute
from tests.interop import made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    run = tmp_path_factory.mktemp("made") / "run"
    made.run(run, dict(made.SHAPE, vocab_size=257, context=4), tokenizer="bytes")
    return run_model.load_model(run, load(run / "config.yaml"), None, Compute(torch.device("cpu"), torch.float32))[0]


def scored(model, documents, begin=256, size=2, most=None):
    return scoring.score(model, documents, begin, size, most, Bar(disable=True))


def test_each_token_is_scored_once_and_those_of_the_last_window_after_a_whole_context():
    assert [*scoring.windows([0, 1, 2, 3, 4, 5], 2)] == [
        Window([0, 1, 2], [True, True]),
        Window([2, 3, 4], [True, True]),
        Window([3, 4, 5], [False, True]),
    ]
    assert [*scoring.windows([0, 1, 2, 3], 2, [True, False, True, True])][1] == Window([1, 2, 3], [False, True])
    assert [*scoring.windows([0, 1, 2], 2)] == [Window([0, 1, 2], [True, True])] and not [*scoring.windows([0], 2)]


def test_scoring_ends_with_the_document_that_has_the_last_token_that_is_wanted(model):
    documents = [Document([1, 2, 3], 4), Document([4, 5], 5), Document([6], 6)]
    found = [scored(model, documents, most=most) for most in (1, 3, 4, 5, 6, None)]
    assert [score.documents for score in found] == [1, 1, 2, 2, 3, 3]
    assert [score.tokens for score in found] == [3, 3, 5, 5, 6, 6]
    assert [score.bytes for score in found] == [4, 4, 9, 9, 15, 15]


def test_without_a_token_to_begin_with_the_first_of_each_document_is_not_scored(model):
    documents = [Document([1, 2, 3], 3), Document([4], 1), Document([5, 6], 2)]
    alone, each = scored(model, documents, None), [scored(model, documents[i : i + 1], None, 1) for i in (0, 2)]
    assert (alone.tokens, alone.documents) == (3, 3)
    assert alone.nats == pytest.approx(sum(score.nats for score in each), rel=1e-5)
    with pytest.raises(ConfigError, match="nothing to score"):
        scored(model, documents[1:2], None)


def test_tokens_that_do_not_count_are_read_and_not_scored_and_such_a_document_has_no_token_before_it(model):
    whole = scored(model, [Document([1, 2, 3], 3)], None)
    parts = [
        scored(model, [Document([1, 2, 3], None, counts)]) for counts in ([True, True, False], [True, False, True])
    ]
    assert [part.tokens for part in parts] == [1, 1] and [part.bytes for part in parts] == [None, None]
    assert whole.nats == pytest.approx(sum(part.nats for part in parts), rel=1e-5)


@pytest.mark.parametrize("token", [257, -1])
def test_a_token_outside_the_vocabulary_is_refused(token, model):
    with pytest.raises(ConfigError, match=r"holds token \d+, outside the run's model.vocab_size=257"):
        scored(model, [Document([1, token, 256], 3)])


def test_scores_of_tasks_are_printed_a_metric_a_line_with_its_error():
    rows = {
        "a": {"acc": 0.25, "acc_stderr": 0.5, "exact,strict": 1.0, "exact_stderr,strict": 0.125},
        "b": {"chrf": math.nan},
    }
    scores = TaskScores(rows, {"a": 3, "b": 2}, 7)
    assert list(scores.lines()) == [
        "a  acc 0.2500 ± 0.5000  step 7",
        "a  exact,strict 1.0000 ± 0.1250  step 7",
        "b  chrf nan  step 7",
    ]
    assert scores.values() == {"tasks": {**rows, "b": {"chrf": None}}, "samples": {"a": 3, "b": 2}, "step": 7}
