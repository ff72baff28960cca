"""Which of the cached tokens a token attends to, and where it is in its own text."""

import torch

from hpclm.config import ModelConfig
from hpclm.model.cache import KeyValueCache

WINDOWS = ModelConfig.of(
    {
        "layers": 2,
        "hidden": 8,
        "attention.heads": 2,
        "context": 16,
        "attention.pattern": ["window", "full"],
        "attention.window": 3,
    }
)
WINDOW, FULL = WINDOWS.blocks


def seen(mask, text):
    """The slots that each new token of a text attends to."""
    return [row.nonzero().flatten().tolist() for row in mask[text, 0]]


def test_a_token_sees_its_window_of_its_own_text_and_padding_only_itself():
    cache = KeyValueCache(WINDOWS, [4, 2], 6, torch.float32, torch.device("cpu"))
    first = cache.extend(4)
    assert first[WINDOW].positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert seen(first[WINDOW].mask, 0) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert seen(first[FULL].mask, 0) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert seen(first[WINDOW].mask, 1) == seen(first[FULL].mask, 1) == [[0], [1], [2], [2, 3]]
    assert cache.extensible
    then = cache.extend(1)
    assert then[FULL].positions.tolist() == [[4], [2]]
    assert [seen(then[WINDOW].mask, text) for text in (0, 1)] == [[[2, 3, 4]]] * 2
    assert [seen(then[FULL].mask, text) for text in (0, 1)] == [[[0, 1, 2, 3, 4]], [[2, 3, 4]]]
    cache.keep([1])
    last = cache.extend(1)
    assert last[FULL].positions.tolist() == [[3]] and seen(last[FULL].mask, 0) == [[2, 3, 4, 5]]
    assert not cache.extensible  # six slots are all it has


def test_texts_of_one_length_need_no_mask_but_for_windows():
    cache = KeyValueCache(WINDOWS, [3, 3], 9, torch.float32, torch.device("cpu"))
    first = cache.extend(3)
    assert first[FULL].mask is None and first[WINDOW].mask is None  # a window of 3 sees all of 3 tokens
    then = cache.extend(1)
    assert then[FULL].mask is None and seen(then[WINDOW].mask, 0) == [[1, 2, 3]]
