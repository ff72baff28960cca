"""Files for tuned models, kept in the run directory: the chat template of the data, and the special tokens and generation settings of the
model that the run starts from."""

import logging
from dataclasses import replace
from pathlib import Path

from hpclm import config
from hpclm.base import files, folders
from hpclm.base.errors import ConfigError, unwritten
from hpclm.config import RunConfig
from hpclm.config.reading import json_object
from hpclm.data import chat_record, tokenizers
from hpclm.data.chat_record import ChatRecord
from hpclm.data.sources import Source, chat

log = logging.getLogger(__name__)
SPECIAL_TOKENS = "special_tokens.json"
IMPORTED = ("chat_template.jinja", "generation_config.json", SPECIAL_TOKENS)
"""Files that an import keeps beside the tokenizer's; the last one marks an imported tokenizer."""


def keep(run: RunConfig, source: Source, step: int) -> None:
    """Keep the files for tuned models, for an attempt that begins after ``step``."""
    if run.checkpoint.init_from and not step:
        keep_imported(run, Path(run.checkpoint.init_from))
    keep_chat(run, chat(source), step)


def keep_chat(run: RunConfig, chat: ChatRecord | None, step: int) -> None:
    """Keep the chat template in the run directory: ``chat`` from its data; otherwise the template of the run so far, or of the run that it
    starts from. ``step``: the step after which the attempt begins."""
    out = Path(run.out)
    origin = out if step else run.checkpoint.init_from and chat_record.owner(Path(run.checkpoint.init_from))
    before = chat_record.of_run(origin) if origin else None
    if chat and before:  # an answer may still end as it did before
        chat = replace(chat, ends={**before.ends, **chat.ends})
    now = chat or before
    if now == chat_record.of_run(out):
        return
    chat_record.keep(out, now)
    if now is None:
        return
    log.info("the chat template is kept in %s; exports carry it in place of any earlier one", out / chat_record.FILE)
    if now.ends:
        log.info("an answer ends with %s, where generation stops", " or ".join(now.ends))
    else:
        log.warning(
            "with this chat template no single token ends an answer, so generation cannot stop there. Use --stop TEXT, or a "
            "template that ends the assistant's turns with a special token"
        )


def keep_imported(run: RunConfig, begun: Path) -> None:
    """Keep the special tokens and generation settings of ``begun``, the imported run or checkpoint that a run starts from.

    Needed if the run has a tokenizer from elsewhere, such as one with added tokens. Nothing is kept if the ids belong to other tokens.
    """
    owner = chat_record.owner(begun)
    beside = [Path(path).parent for path in tokenizers.files_of_run(run.data)[:1]]
    kept = Path(run.out) / "tokenizer"
    if not beside or not (owner / "config.yaml").is_file():
        return
    if any((place / SPECIAL_TOKENS).is_file() for place in (*beside, kept)):
        return
    try:
        base = config.of_run(owner, []).data
        places = [*(Path(path).parent for path in tokenizers.files_of_run(base)[:1]), owner / "tokenizer"]
        place = next((place for place in places if (place / SPECIAL_TOKENS).is_file()), None)
        if place is None or not _same_tokens(place, tokenizers.of_run(base), tokenizers.of_run(run.data)):
            return
        folders.make_folder(kept, 0o700)
        for name in IMPORTED:
            if (place / name).is_file():
                files.write_bytes(kept / name, files.read_bytes(place / name))
    except ConfigError as error:  # its tokenizer's files may be gone
        log.warning("special tokens and generation settings of %s are not kept: %s", owner, error)
    except OSError as error:
        raise unwritten(error, kept, "choose another out, or free some space") from error


def _same_tokens(place: Path, before: tokenizers.Tokenizer, now: tokenizers.Tokenizer) -> bool:
    """Whether the special tokens that the folder ``place`` names have the same ids in two tokenizers."""
    values = json_object(place / SPECIAL_TOKENS).values()
    ids = [id for value in values for id in (value if isinstance(value, list) else [value]) if type(id) is int]
    return all(0 <= id < min(before.size, now.size) and before.decode([id]) == now.decode([id]) for id in ids)
