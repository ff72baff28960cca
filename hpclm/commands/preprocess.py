"""``hpclm preprocess``: turn text into a dataset; Megatron users know it as tools/preprocess_data.py."""

import time

from hpclm import log
from hpclm.data.text import build, parts
from hpclm.data.text.encode import tokenizer_of
from hpclm.data.text.options import request
from hpclm.data.text.pool import exit_on_signals
from hpclm.files import writable_folder


def main(argv: list[str]) -> int:
    """``hpclm preprocess``: read the arguments, write the datasets, print the command to run next."""
    log.setup()
    asked = request(argv)
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    with exit_on_signals():
        if asked.share.parts > 1:
            return parts.main(asked)
        build.refuse_to_replace(asked, [prefix for corpus in asked.corpora for prefix in corpus.prefixes])
        for corpus in asked.corpora:
            writable_folder(corpus.prefixes[0].parent, "output folder")
        if asked.dictionary is not None:
            build.write_dictionary(asked.dictionary, asked)
        build.check(asked.job)
        for corpus in asked.corpora:
            began = time.monotonic()
            reports = build.write(corpus, asked, corpus.prefixes)
            seconds = time.monotonic() - began
            size = sum(source.size for source in corpus.inputs)
            build.tell(reports, asked.job, f"; {size / 1e6 / seconds:.1f} MB/s" if size else "")
    build.tell_next([corpus.prefixes[0] for corpus in asked.corpora], asked)
    return 0
