"""Which of the cached tokens a token attends to, and where it is in its own text."""

import torch

from hpclm.config import ModelConfig
from hpclm.model.attention.layout import visible
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


def seen(cache, layout, text):
    """The slots that each new token of a text attends to."""
    columns, new = torch.arange(cache.used), layout.positions.shape[1]
    of_text = layout.documents[text] if layout.documents is not None else torch.zeros(cache.used)
    rows = visible(columns[:, None], columns, layout.window, (of_text[:, None], of_text))[-new:]
    return [row.nonzero().flatten().tolist() for row in rows]


def test_a_token_sees_its_window_of_its_own_text():
    cache = KeyValueCache(WINDOWS, [4, 2], 6, torch.float32, torch.device("cpu"))
    first = cache.extend(4)
    assert first[WINDOW].positions.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert seen(cache, first[WINDOW], 0) == [[0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert seen(cache, first[FULL], 0) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert seen(cache, first[WINDOW], 1) == seen(cache, first[FULL], 1) == [[0], [0, 1], [2], [2, 3]]
    assert cache.extensible
    then = cache.extend(1)
    assert then[FULL].positions.tolist() == [[4], [2]]
    assert [seen(cache, then[WINDOW], text) for text in (0, 1)] == [[[2, 3, 4]]] * 2
    assert [seen(cache, then[FULL], text) for text in (0, 1)] == [[[0, 1, 2, 3, 4]], [[2, 3, 4]]]
    cache.keep([1])
    last = cache.extend(1)
    assert last[FULL].positions.tolist() == [[3]] and seen(cache, last[FULL], 0) == [[2, 3, 4, 5]]
    assert not cache.extensible  # six slots are all it has


def test_texts_of_one_length_need_no_mask_but_for_windows():
    cache = KeyValueCache(WINDOWS, [3, 3], 9, torch.float32, torch.device("cpu"))
    first = cache.extend(3)
    assert first[FULL].plain and first[WINDOW].plain  # a window of 3 sees all of 3 tokens
    then = cache.extend(1)
    assert then[FULL].plain and seen(cache, then[WINDOW], 0) == [[1, 2, 3]]
