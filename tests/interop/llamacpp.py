"""What llama.cpp computes on a CPU, by the low-level functions of llama-cpp-python."""

from contextlib import contextmanager

import numpy as np
import pytest


@contextmanager
def loaded(path):
    """A model of llama.cpp; the test is skipped where it is not installed."""
    there = pytest.importorskip("llama_cpp")
    model = there.llama_model_load_from_file(str(path).encode(), there.llama_model_default_params())
    assert model, f"llama.cpp cannot load {path}"
    yield model
    there.llama_model_free(model)


def logits(model, ids):
    """[t, V], with keys and values kept in fp32."""
    import llama_cpp as there

    options = there.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = len(ids)
    options.type_k = options.type_v = there.GGML_TYPE_F32
    options.flash_attn_type = there.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.n_threads = options.n_threads_batch = 1
    context, batch = there.llama_init_from_model(model, options), there.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for place, id in enumerate(ids):
        batch.token[place], batch.pos[place], batch.logits[place] = int(id), place, 1
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert there.llama_decode(context, batch) == 0
    size = there.llama_vocab_n_tokens(there.llama_model_get_vocab(model))
    rows = [there.llama_get_logits_ith(context, place) for place in range(len(ids))]
    found = np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])
    there.llama_batch_free(batch)
    there.llama_free(context)
    return found


def tokens(model, text):
    """Ids of a text, with nothing before or after it, and special tokens in it as ordinary text."""
    import llama_cpp as there

    raw = text.encode()
    ids = (there.llama_token * (2 * len(raw) + 16))()
    count = there.llama_tokenize(there.llama_model_get_vocab(model), raw, len(raw), ids, len(ids), False, False)
    return list(ids[:count])
