"""``hpclm preprocess``: turn text into a dataset. Also takes the options of Megatron's preprocess_data.py and fairseq-preprocess."""

from hpclm import log
from hpclm.datasets import build, options, parts
from hpclm.datasets.encode import tokenizer_of
from hpclm.datasets.next_command import next_command, next_tuning_command
from hpclm.folders import writable_folder
from hpclm.node.interruption import prompt_exit
from hpclm.terminal import say

parser = options.parser


def main(argv: list[str]) -> int:
    """``hpclm preprocess``: read the arguments, write the datasets, print the command to run next."""
    log.setup()
    request = options.parse(argv)
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    with prompt_exit():
        if request.share.parts > 1:
            if not parts.write_part(request):
                return 0
        else:
            build.refuse_to_replace(request, [prefix for corpus in request.corpora for prefix in corpus.prefixes])
            for corpus in request.corpora:
                writable_folder(corpus.prefixes[0].parent, "output folder")
            if request.dictionary is not None:
                build.write_dictionary(request.dictionary, request)
            build.check(request.job)
            for corpus in request.corpora:
                build.write(corpus, request, corpus.prefixes)
    prefixes = [corpus.prefixes[0] for corpus in request.corpora]
    if request.job.chat or request.model:
        say(f"next: {next_tuning_command(prefixes[0], request.model or 'RUN', request.job.chat is not None)}")
    else:
        say(f"next: {next_command(prefixes, tokenizer_of(request.job).size)}")
    return 0
