"""The rules of the house, checked: who may import whom, and where the outside world may enter."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from hpclm import cli

HOUSE = Path(__file__).parents[1] / "hpclm"
FILES = sorted(HOUSE.rglob("*.py"))

# Each floor may import from its own room and from the floors below it.
FLOORS = [
    {"base"},
    {"config"},
    {"node"},
    {"parser"},
    {"completion"},
    {"distributed"},
    {"rundir"},
    {"sinks"},
    {"parallel"},
    {"data", "model", "optim"},
    {"engine"},
    {"planning", "reporting"},
    {"checkpoint"},
    {"diagnostics"},
    {"preprocess"},
    {"inference"},
    {"interop"},
    {"training"},
    {"launch", "ledger"},
    {"trials"},
    {"api", "documentation"},
    {"cli"},
    {"commands"},
    {"__main__", "train", "submit"},
    {"__init__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# A library that has one door into the house.
DOORS = {
    "deepspeed": "engine/deepspeed/",
    "fairscale": "engine/fairscale.py",
    "mpi4py": "distributed/rendezvous.py",
    "psutil": "node/",
    "submitit": "launch/schedulers/slurm_script.py",
    "apex": "node/apex.py",
    "gigatoken": "preprocess/tokenizers/gigatokens.py",
    "sentencepiece": "preprocess/tokenizers/sentencepieces.py",
    "tokenizers": "preprocess/tokenizers/huggingface.py",
    "gguf": "interop/gguf/file.py",
    "pyarrow": "preprocess/tables.py",
    "omegaconf": "config/merge.py",
    "tensorboard": "training/tensorboard.py",
    "bokeh": "reporting/plots.py",
    "matplotlib": "reporting/",
    "lm_eval": "inference/harness.py",
    "wandb": "sinks/wandb.py",
    "mlflow": "sinks/mlflow.py",
    "trackio": "sinks/trackio.py",
}


def name_of(path):
    return path.relative_to(HOUSE).as_posix()


NAMES = {name_of(path): path for path in FILES}


@functools.cache
def nodes_of(name):
    """Every node of a file's syntax tree."""
    return list(ast.walk(ast.parse(NAMES[name].read_text())))


def room_of(name):
    return name.split("/")[0].removesuffix(".py")


def imported(name):
    for node in nodes_of(name):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(name):
    """The calls in a file, and the names of what they call."""
    return [(node, ast.unparse(node.func)) for node in nodes_of(name) if isinstance(node, ast.Call)]


def test_a_file_imports_only_what_stands_below_it():
    for name in NAMES:
        room = room_of(name)
        for module in imported(name):
            top, *rest = module.split(".")
            assert name.startswith(DOORS.get(top, name)), f"{name} imports {top}; only {DOORS[top]} may"
            if top != "hpclm" or rest[0] in (room, "__version__"):
                continue
            assert rest[0] in FLOOR, f"{name} imports {module}, which has no floor"
            assert FLOOR[rest[0]] < FLOOR[room], f"{name} imports {module}, which is not below it"


def test_only_cli_loads_verbs_and_each_of_its_rows_is_a_file():
    """What two verbs need, or the interface for Python, is in a folder below commands/."""
    for path in [*FILES, *(HOUSE.parent / "tools").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [
            f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
        named = any("hpclm.commands" in text for text in (*modules, *texts))
        assert not named or path == HOUSE / "cli.py", f"{path} loads a verb"
    files = {path.stem for path in (HOUSE / "commands").glob("[a-z]*.py")}
    assert files == {verb.replace("-", "_") for verb in cli.VERBS}
    for verb in cli.VERBS:
        assert cli.parser(verb).prog == f"hpclm {verb}" and callable(cli.function(verb))


CORE = {"config", "parallel", "model", "optim", "data", "engine", "checkpoint", "diagnostics", "training"}


CORE = {"config", "parallel", "model", "optim", "data", "engine", "checkpoint", "diagnostics", "training"}
LEAVES = {
    "planning",
    "interop",
    "inference",
    "preprocess",
    "launch",
    "ledger",
    "trials",
    "reporting",
    "commands",
    "api",
}


def test_the_core_imports_no_leaf():
    for name in NAMES:
        rooms = {module.split(".")[1] for module in imported(name) if module.startswith("hpclm.")}
        assert room_of(name) not in CORE or not rooms & LEAVES, name


def test_no_file_keeps_global_state_or_reads_the_environment_outside_its_places():
    places = ("node/", "distributed/", "launch/", "diagnostics/", "rundir/", "base/paths.py")
    for name, nodes in ((name, nodes_of(name)) for name in NAMES):
        assert not any(isinstance(node, ast.Global) for node in nodes), name
        written = {id(n.value) for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)}
        asked = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        reads = [node for node in asked if id(node) not in written]
        assert name.startswith(places) or not reads, f"{name}: only {places} read the environment"


SLURMS_VARIABLES = ("node/slurm.py", "launch/schedulers/slurm", "launch/srun.py")
"""The files that name variables of Slurm: who a process is, Slurm's commands and scripts, srun in an allocation."""
SLURMS_COMMANDS = re.compile(r"scontrol|squeue|sbatch|scancel|sinfo|sacct")


def test_only_the_files_of_slurm_name_its_variables_and_call_its_commands():
    for name in NAMES:
        texts = [
            node.value for node in nodes_of(name) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        named = [text for text in texts if "SLURM_" in text]
        assert name.startswith(SLURMS_VARIABLES) or not named, f"{name}: {named}"
        called = [text for text in texts if SLURMS_COMMANDS.fullmatch(text)]
        assert name.startswith(("launch/schedulers/slurm", *KNOW_OF_SBATCH)) or not called, f"{name}: {called}"


KNOW_OF_SBATCH = ("diagnostics/facts.py", "launch/submit.py")
"""Files that look whether sbatch is installed."""


def test_only_the_launchers_table_knows_that_srun_starts_ranks_and_nothing_else_that_trains_knows_a_scheduler():
    rooms = ("training/", "rundir/", "engine/", "checkpoint/", "distributed/", "diagnostics/")
    for name in NAMES.keys() - {"distributed/bootstrap.py"}:
        known = [module for module in imported(name) if module.startswith("hpclm.node.slurm")]
        assert not (name.startswith(rooms) and known), name


def test_importing_hpclm_and_its_verbs_loads_no_heavy_library():
    heavy = "{'torch', 'deepspeed', 'fairscale', 'numpy', 'tensorboard', 'safetensors', 'mpi4py', 'submitit'}"
    code = f"import sys, hpclm, hpclm.cli, hpclm.commands.train, hpclm.commands.planner, hpclm.commands.config; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


METRICS = "rundir/metrics_file.py"
RUN_FILES = {
    **dict.fromkeys(
        ("metrics.jsonl", "metrics.lost.jsonl", "metrics.rolled-back", "scores.jsonl", "experts.jsonl"), METRICS
    ),
    "events.jsonl": "rundir/events.py",
}
"""Files of a run, and the one module that opens each."""
LOOKS = {"config/run_file.py": "asks which of them exist; it stands below rundir/"}
"""A module that has their names and opens none."""


def test_one_module_opens_a_file_of_a_run():
    """Others have its name only in messages, which have spaces, and take none from that module."""
    constants = {"LOST", "SCORES", "EXPERTS"}
    for file in NAMES.keys() - LOOKS.keys():
        for node in nodes_of(file):
            text = str(node.value) if isinstance(node, ast.Constant) else ""
            doors = {door for name, door in RUN_FILES.items() if name in text and not set(text) & set(" \n")}
            assert doors <= {file}, f"{file} names {text}; only {doors} may"
            if isinstance(node, ast.Attribute) and room_of(file) != "rundir":
                assert ast.unparse(node) not in {f"{door}.{name}" for door in DOORS_OF_RUNS for name in constants}, file
            if isinstance(node, ast.ImportFrom) and (node.module or "").removeprefix("hpclm.rundir.") in DOORS_OF_RUNS:
                assert not constants & {alias.name for alias in node.names}, file


DOORS_OF_RUNS = {Path(door).stem for door in RUN_FILES.values()}

# Files that the kernel provides are not part of a run: reading them does not wait, and they have no size.
OF_THE_KERNEL = (
    *(
        "node/hardware.py",
        "node/threads.py",
        "node/processes.py",
        "node/parent.py",
        "diagnostics/facts.py",
        "distributed/peers.py",
    ),
    "distributed/stragglers.py",
    "preprocess/tokenizers/gigatokens.py",
)
FOLDERS_AND_NULL = {"node/failures.py": 3, "checkpoint/format.py": 1}
"""How often a file opens a folder, /dev/null, or a file that must not be there yet."""


def test_only_files_py_opens_files_to_read_or_to_append():
    for file in NAMES:
        made = calls(file)
        low = sum(name == "os.open" for _, name in made)
        assert file == "base/files.py" or low == FOLDERS_AND_NULL.get(file, 0), file
        if file in (*OF_THE_KERNEL, "base/files.py"):
            continue
        for call, name in made:
            assert name.startswith("files.") or not name.endswith((".read_text", ".read_bytes")), f"{file}: {name}"
            if name == "open" or (name.endswith(".open") and name != "os.open"):
                words = [word.value for word in call.args if isinstance(word, ast.Constant)]
                assert any("w" in word or "x" in word for word in words), f"{ast.unparse(call)}: use files.opened"


def test_what_verbs_say_is_made_harmless_for_terminals():
    """Beside ``terminal.say``, only text of hpclm's own and JSON are printed."""
    for file in NAMES.keys() - SAFE.keys() - {"base/terminal.py"}:
        for text, call in [(ast.unparse(call), call) for call, name in calls(file) if name == "print"]:
            own = all(isinstance(word, ast.Constant) for word in call.args)
            assert own or any(each in text for each in ("json.dumps", "terminal.", "__version__")), f"{file}: {text}"


SAFE = {
    "cli.py": "its own verbs",
    "node/failures.py": "names of functions and numbers",
    "commands/generate.py": "into a pipe or a file",
    "commands/status.py": "lines whose cells are plain already",
    "commands/data.py": "numbers",
    "launch/torchrun.py": "the launcher's own lines",
    "launch/submit.py": "numbers",
}
"""Files that print something else, and what it is."""


BELOW_TRAINING = [room for room, floor in FLOOR.items() if FLOOR["config"] < floor < FLOOR["training"]]
OF_WHOLE_RUNS = {
    "planning/": "forecasts a run, and tries others that differ in any section",
    "data/split_by.py": "decides by a run's data, context, evaluations and folder how its data are divided",
    "preprocess/command_line.py": "composes a run, and makes the dataset that its data= names",
    "preprocess/text_dataset.py": "makes a dataset beside a run, which keeps what it has begun with",
    "diagnostics/self_check.py": "makes a miniature of a run, from its model, engine, data, saving and cluster",
    "interop/run.py": "reads a run's config.yaml, and writes that of an imported one",
    "inference/run_settings.py": "makes the settings of one process from those of a run",
}
"""Files below training/ that take all the settings of a run, and why; the others take the sections that they depend on."""


def test_below_training_only_what_deals_with_whole_runs_takes_all_settings():
    for name in NAMES:
        if room_of(name) not in BELOW_TRAINING or name.startswith(tuple(OF_WHOLE_RUNS)):
            continue
        for node in nodes_of(name):
            if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation:
                assert "RunConfig" not in ast.unparse(node.annotation), f"{name}:{node.lineno}"


def test_a_mesh_travels_with_its_device_and_type():
    """As a Compute; the model alone takes a mesh and a type, because its layers get their device as they are built."""
    for name in NAMES:
        for node in (node for node in nodes_of(name) if isinstance(node, ast.FunctionDef)):
            arguments = [*node.args.args, *node.args.kwonlyargs]
            kinds = {ast.unparse(argument.annotation) for argument in arguments if argument.annotation}
            apart = kinds & {"Mesh", "torch.device", "torch.dtype"}
            assert "Mesh" not in apart or apart == {"Mesh"} or name == "model/stack.py", f"{name}: {node.name}"


def test_no_files_import_each_other_in_a_circle():
    """But hpclm/__init__.py, which loads what it offers when it is used."""
    named = {".".join(path.relative_to(HOUSE.parent).with_suffix("").parts): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in named.items() if name != "hpclm.__init__"}
    edges = {name: set(files_imported(name_of(path), modules)) for name, path in modules.items()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        for name in leaves:
            del edges[name]
    assert not edges, {name: sorted(targets & edges.keys()) for name, targets in edges.items()}


def files_imported(file, modules):
    """The modules that a file imports, wherever in it."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in modules else node.module


BANNED = re.compile(
    r"\b(what is wrong|there (is|are) none|as far as|in so far|of (one's|its|their) own|what else|told of|goes by|shares? out|"
    r"whereof|thereof|such a one)\b",
    re.IGNORECASE,
)
"""Turns of phrase that readers had to read twice."""


def test_no_sentence_has_a_turn_of_phrase_that_is_read_twice():
    found = [f"{name}: {match[0]}" for name, path in NAMES.items() for match in BANNED.finditer(path.read_text())]
    assert not found


def test_what_a_docstring_puts_between_double_backticks_exists_in_its_file():
    for name in NAMES:
        nodes = nodes_of(name)
        there = {word for node in nodes for word in identifiers(node)}
        texts = [
            text for node in nodes if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False))
        ]
        named = {word for text in texts for word in re.findall(r"``([A-Za-z_]\w*)``", text)}
        assert named <= there, (name, named - there)


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def identifiers(node):
    """The names that a node of a syntax tree has."""
    for field in ("id", "arg", "attr", "name", "module"):
        if isinstance(value := getattr(node, field, None), str):
            yield from value.split(".")
