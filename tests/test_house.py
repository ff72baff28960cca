"""The rules of the house, checked: who may import whom, and where the outside world may enter."""

import ast
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / "hpclm"
FILES = sorted(HOUSE.rglob("*.py"))

# Each floor may import from its own room and from the floors below it.
FLOORS = [
    {"errors"},
    {"registry", "log", "files", "apex"},
    {"config"},
    {"cluster"},
    {"job"},
    {"parallel"},
    {"data", "model", "optim"},
    {"planning"},
    {"engine"},
    {"checkpoint"},
    {"meter", "record", "agreement"},
    {"validation", "saver", "interop"},
    {"deadline"},
    {"loop"},
    {"cli"},
    {"train", "evaluate", "generate", "convert", "preprocess", "__main__"},
    {"submit"},
    {"status", "logs", "cancel", "checkpoints", "save_now", "stop", "resume", "doctor", "planner", "import_deepspeed"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# A library that has one door into the house.
DOORS = {
    "deepspeed": "engine/deepspeed/",
    "fairscale": "engine/fairscale.py",
    "mpi4py": "cluster/rendezvous.py",
    "submitit": "job/queue.py",
    "apex": "apex.py",
    "gigatoken": "data/tokenizers/gigatokens.py",
    "sentencepiece": "data/tokenizers/sentencepieces.py",
    "tokenizers": "data/tokenizers/huggingface.py",
    "omegaconf": "config/compose.py",
    "tensorboard": "meter.py",
}
# A room's command line may use how verbs end, which stands above it.
VERBS = {
    "config/__main__.py",
    "config/show.py",
    "data/__main__.py",
    "data/preprocess.py",
    "data/train_tokenizer.py",
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path):
    return path.relative_to(HOUSE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_stands_below_it(path):
    name = name_of(path)
    room = name.split("/")[0].removesuffix(".py")
    for module in imported(path):
        top, *rest = module.split(".")
        assert name.startswith(DOORS.get(top, name)), f"{name} imports {top}; only {DOORS[top]} may"
        if top != "hpclm" or rest[0] in (room, "__version__") or (name in VERBS and rest[0] == "cli"):
            continue
        assert rest[0] in FLOOR, f"{name} imports {module}, which has no floor"
        assert FLOOR[rest[0]] < FLOOR[room], f"{name} imports {module}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_keeps_global_state_or_reads_the_environment_outside_cluster(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assert not any(isinstance(node, ast.Global) for node in nodes)
    written = {id(node.value) for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)}
    reads = [
        n for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv") and id(n) not in written
    ]
    assert name_of(path).startswith("cluster/") or not reads, "only cluster/ reads the environment"


def test_importing_hpclm_and_its_verbs_loads_no_heavy_library():
    import subprocess
    import sys

    heavy = "{'torch', 'deepspeed', 'fairscale', 'numpy', 'tensorboard', 'safetensors', 'mpi4py', 'submitit'}"
    code = f"import sys, hpclm, hpclm.cli, hpclm.train, hpclm.planner, hpclm.config.show; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
