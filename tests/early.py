"""python -m tests.early: reads a JSON list of commands, and prints how each ends in a fork that cannot import PyTorch."""

import contextlib
import importlib
import json
import os
import sys
import tempfile
from importlib.abc import MetaPathFinder

from hpclm import cli


class WithoutTorch(MetaPathFinder):
    """Ends the import of PyTorch."""

    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise RuntimeError("PyTorch is imported")


def ended(words):
    """Exit code, and what was printed."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            for number, handle in enumerate((os.open(os.devnull, os.O_RDONLY), said.fileno(), said.fileno())):
                os.dup2(handle, number)
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    code = cli.main(words)
                except SystemExit as end:
                    code = end.code
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace")


if __name__ == "__main__":
    sys.meta_path.insert(0, WithoutTorch())
    for verb in cli.VERBS:  # once, not in each fork
        cli.function(verb)
    importlib.import_module("hpclm.data.sources")
    importlib.import_module("hpclm.reporting.page")
    answers = [ended(words) for words in json.load(sys.stdin)]
    assert "torch" not in sys.modules
    print(json.dumps(answers))
