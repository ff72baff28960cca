"""``hpclm train-tokenizer``: train a byte-level BPE (tokenizer.json), or a sentencepiece .model."""

from typing import Any

from hpclm.base import log, paths
from hpclm.base.terminal import say
from hpclm.parser import Parser, whole
from hpclm.preprocess.inputs import FORMAT, LONGEST_LINE, MAX_LINE_MB
from hpclm.preprocess.tokenizers.sentencepieces import SENTENCES
from hpclm.preprocess.train_tokenizer import TokenizerRequest, train


def main(**options: Any) -> int:
    """Train and write a tokenizer, and print its compression and the next command."""
    log.setup()
    say("\n".join(train(TokenizerRequest(**options))))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm train-tokenizer``."""
    options = Parser(
        prog="hpclm train-tokenizer",
        description="Train a tokenizer: a byte-level BPE (tokenizer.json), or a sentencepiece .model.",
        allow_abbrev=False,
    )
    add = options.add_argument
    texts = "the same as for hpclm preprocess --input"
    add("--input", type=paths.option, nargs="+", required=True, metavar="FILE", help=texts)
    add("--format", choices=["jsonl", "lines", "files"], help=FORMAT)
    add("--json-key", "--column", metavar="KEY", help="key, or column, of the text; default: text")
    add("--longest-line", type=whole(1), default=MAX_LINE_MB, metavar="MB", help=LONGEST_LINE)
    output = "x.json: byte-level BPE, with <|endoftext|>; x.model: sentencepiece"
    add("--output", type=paths.option, required=True, metavar="FILE", help=output)
    add("--kind", choices=["bpe", "unigram"], default="bpe", help="unigram is for x.model only")
    size = "maximum number of entries, including special ones; default for x.json: what fits the text (512 for 300 kB, 1024 for 1 MB, 32768 for 1 GB)"
    add("--vocab-size", type=int, metavar="N", help=size)
    sentences = f"random lines for training sentencepiece, held in memory; default: {SENTENCES:,}"
    add("--sentences", type=whole(1), metavar="N", help=sentences)
    add("--overwrite", action="store_true", help="replace a tokenizer of that name")
    return options
