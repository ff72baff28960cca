"""The folder with the tokenizer of a run, OUT/tokenizer, made when the run begins."""

import logging
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError, unwritten
from hpclm.checkpoint import directory
from hpclm.config import DataConfig, RunConfig
from hpclm.data import loss_mask, tokenizer_folder, tokenizer_writer
from hpclm.data.indexed import COUNTS, sidecar
from hpclm.data.tokenizer_folder import NOTE, TokenizerFolder
from hpclm.data.tokenizers import mismatch

log = logging.getLogger(__name__)


def keep(run: RunConfig, fingerprint: dict[str, Any] | None, step: int) -> None:
    """Make the folder, if the tokenizer is known. ``fingerprint``: that of the data's tokenizer. ``step``: after which the attempt begins;
    a resumed run has its folder already.

    ConfigError if the tokenizer is not the one that the data were made with.
    """
    place = Path(run.out) / "tokenizer"
    if not fingerprint or (step and (place / NOTE).is_file()):
        return
    folder = tokenizer_folder.of_data(run.data)
    tokenizer = folder.build()
    differences = mismatch(fingerprint, tokenizer.fingerprint)
    if differences:
        raise ConfigError(
            f"the tokenizer of the data has changed: {differences}; restore its files, or set data.tokenizer"
        )
    origin = Path(run.checkpoint.init_from) if run.checkpoint.init_from else Path(run.out)
    base = tokenizer_folder.read(directory.run_of(origin) / "tokenizer")
    if base.kind and run.checkpoint.init_from:
        other = mismatch(base.build().fingerprint, tokenizer.fingerprint)
        if other:
            log.warning("the weights of %s have learned another tokenizer: %s", origin, other)
    folder = tokenizer_writer.begun_from(base, tokenizer_writer.with_ends(folder, tokenizer), tokenizer)
    try:
        tokenizer_writer.write(place, folder, tokenizer)
    except OSError as error:
        raise unwritten(error, place, "choose another out, or free some space") from error
    _report(folder, run.data)


def _report(folder: TokenizerFolder, data: DataConfig) -> None:
    """Log the tokens that end an answer in the conversations of ``data``."""
    notes = [note for note in map(sidecar, data.prefixes()) if loss_mask.KEY in note]
    ends = sorted(set[str]().union(*(note.get(COUNTS, {}).get("ends", {}) for note in notes)))
    if ends:
        log.info("an answer ends with %s, where generation stops", " or ".join(ends))
    elif notes:
        log.warning(
            "with this chat template no single token ends an answer, so generation cannot stop there. Use --stop TEXT, or a "
            "template that ends the assistant's turns with a special token"
        )
