"""Folders as inputs of preprocessing: a dataset saved by Hugging Face's "datasets", or a folder of shards.

Source of the layout: huggingface/datasets src/datasets/arrow_dataset.py and dataset_dict.py (save_to_disk).
"""

import json
import re
from pathlib import Path

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_text
from hpclm.preprocess.kinds import JSON_LINES, TABLES, suffix_and_storage

KINDS = (*JSON_LINES, *TABLES)
TEXT = ".txt"
"""Extension of the files to read in a folder without any of ``KINDS``."""
UNPACKED_FIRST = re.compile(r"\.(xz|bz2|lz4|zip|lzma|7z|snappy|br)$", re.IGNORECASE)
"""Extensions of compressed files that cannot be read. files_in() ignores this extension, so that
such a shard is found and later refused, not silently left out."""
ABOUT = {"dataset_info.json", "dataset_infos.json"}
"""Descriptions that accompany the data."""
SPLITS = {"train", "validation", "valid", "val", "dev", "test"}


def files_in(folder: Path, any_text: bool) -> list[str]:
    """The data files of ``folder``, in order; with ``any_text``, all files of a folder not saved by `datasets`.

    ConfigError if it has several splits, which do not form one corpus, or no data.
    """
    if (folder / "dataset_dict.json").exists():
        splits = [str(state.parent) for state in sorted(folder.glob("*/state.json"))]
        raise ConfigError(f"{folder} holds several splits; give one: {', '.join(splits)}")
    if (folder / "state.json").exists():
        return _saved(folder)
    visible = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    files = [path for path in visible if path.is_file() and path.name not in ABOUT]
    endings = {path: suffix_and_storage(UNPACKED_FIRST.sub("", path.name))[0] for path in files}
    shards = [path for path in files if any_text or endings[path] in KINDS]
    shards = shards or [path for path in files if endings[path] == TEXT]
    if not shards:
        problem = f"folder {folder} has no {', '.join((*KINDS, TEXT))} file, plain, .gz or .zst"
        inner = [path.name for path in visible if path.is_dir()]
        if inner:
            problem += f"; its folders are not searched: give one of {', '.join(inner)}"
        raise ConfigError(problem)
    splits = sorted({word for path in shards for word in re.split(r"[-_.]", path.name)} & SPLITS)
    if len(splits) > 1:
        patterns = [f"'{folder}/*{split}*'" for split in splits]
        raise ConfigError(f"folder {folder} holds several splits; give one as a pattern: {', '.join(patterns)}")
    return [str(path) for path in shards]


def _saved(folder: Path) -> list[str]:
    """The Arrow files of one saved dataset, as listed in its state.json."""
    state = folder / "state.json"
    try:
        written = json.loads(read_text(state))
        names = [Path(file["filename"]).name for file in written["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{state} is not what datasets writes ({error}); save the dataset again") from None
    if written.get("_indices_data_files"):
        raise ConfigError(f"{folder} selects rows by an indices file; save it with a current version of datasets")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(f"{folder} is not complete: {absent[0]}, which state.json lists, is missing; copy it again")
    return [str(folder / name) for name in names]
