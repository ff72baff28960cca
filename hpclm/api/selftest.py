"""``hpclm.selftest``: tests user code in separate processes."""

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hpclm.api.checked import checked
from hpclm.api.options import Change, words
from hpclm.base.errors import ConfigError, ExitCode, HpclmError
from hpclm.node import processes, python
from hpclm.trials.verdict import LayoutVerdict, Result

LONGEST = 3600.0  # seconds that a test may take


@checked
def selftest(name: str, *changes: Change, kind: str | None = None, only: Sequence[str] = ()) -> Result:
    """Test your block, optimizer, data source or other code in every layout of processes, as `hpclm selftest` does.

    >>> hpclm.selftest("mine:GatedBlock", {"model.hidden": 64}).agrees
    True

    Args:
        name: the code as module:name; Python must be able to import the module here.
        changes: settings of the toy that trains.
        kind: the kind of code, if it is ambiguous: "block", "optimizer", "source", "schedule", "engine", "tokenizer" or "sink".
        only: names of the layouts to test, such as "tensor 2"; all by default.

    Returns:
        The result of each layout. Printing it shows the same lines as the command.

    Raises:
        ConfigError: the code cannot be found, or does not work in one process.
    """
    arguments = [name, *words(changes), "--json"]
    if kind:
        arguments += ["--kind", kind]
    for layout in only:
        arguments += ["--only", layout]
    env = python.safe_env()
    folders = [str(folder) for folder in _folders(name)]
    env["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [env.get("PYTHONPATH", "")])])
    code, output, errors = processes.ask(python.command("hpclm", "selftest", *arguments), LONGEST, env)
    if not output.strip():
        problems = [line.removeprefix("error: ") for line in errors.strip().splitlines()]
        raise ConfigError(problems) if code == ExitCode.INVALID else HpclmError("\n".join(problems))
    fields = json.loads(output)
    verdicts = [LayoutVerdict(**{**verdict, "details": tuple(verdict["details"])}) for verdict in fields["verdicts"]]
    return Result(fields["name"], fields["kind"], tuple(verdicts))


def _folders(name: str) -> list[Path]:
    """The folder that contains the module of ``name``; empty if Python finds none."""
    top = name.partition(":")[0].partition(".")[0]
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        return []
    inner = [Path(place) for place in (spec and spec.submodule_search_locations) or []]
    if inner:
        return [inner[0].parent]
    return [Path(spec.origin).parent] if spec and spec.has_location and spec.origin else []
