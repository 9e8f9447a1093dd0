"""The rooms of the package keep their order, their lightness, their names and their size.

The order is the table of rooms in AGENTS.md: a file imports from its own room or from rooms before
it. Rooms that servers, workers and the planner share import neither JAX nor torch.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rlx.__main__

PACKAGE = Path(rlx.__file__).parent
README = PACKAGE.parent / "README.md"
COMMANDS = (
    "main", "serve", "convert", "replay", "report", "compare", "evaluate", "debug_workflow",
    "gateway", "cluster", "k8s", "keys", "configs", "push", "sweep", "runs", "status",
    "__main__",
)  # fmt: skip
ROOM_COMMANDS = ("doctor", "areal", "plan", "tinker")
ORDER = (
    "", "base", "system", "option", "journal", "algorithms", "cli", "model", "train", "observe",
    "fleet", "engines", "sandbox", "workers", "environments", "rewards", "rollout", "agents",
    "launch", "mismatch", "evaluation", "doctor", "plan", "debugger", "config", "areal", "run",
    "tinker",
)  # fmt: skip
LEVEL = {room: level for level, room in enumerate(ORDER)} | dict.fromkeys(
    (*COMMANDS, "commands"), 99
)
LIGHT_ROOMS = (
    "", "base", "system", "option", "journal", "config", "cli", "observe", "fleet", "engines",
    "sandbox", "workers", "environments", "rewards", "rollout", "agents", "debugger", "launch",
    "evaluation", "areal",
)  # fmt: skip
LIGHT_FILES = (
    "algorithms/algorithm.py", "algorithms/presets.py",
    "algorithms/signatures.py",
    "algorithms/surrogates.py", "algorithms/array_ops.py", "algorithms/advantages.py",
    "algorithms/kl.py", "algorithms/losses.py", "algorithms/supervised.py",
    "train/batch_update.py", "train/conductor.py", "train/contract.py",
    "train/hosts.py", "train/objective.py", "train/packing.py", "train/prefix_trees.py",
    "train/step_metrics.py", "train/train_options.py", "model/lora_config.py",
    "model/compile_cache.py", "model/directory.py",
    "model/gguf_files.py", "model/mesh.py", "model/model_config.py",
    "model/config_forms.py", "model/rope.py",
    "model/tensors.py",
)  # fmt: skip
ENGINES = (  # programs of JAX and torch in a light room
    "engines/jax/decode.py", "engines/jax/jax_engine.py", "engines/jax/kv_cache.py",
    "engines/jax/programs.py", "engines/jax/regenerate.py", "engines/jax/sampling.py",
    "engines/jax/serving_params.py", "engines/vllm/vllm_cast.py",
    "engines/vllm/vllm_engine.py",
    "engines/vllm/vllm_images.py", "engines/vllm/vllm_start.py", "engines/vllm/vllm_worker.py",
)  # fmt: skip
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "torch", "vllm", "rlx_torch"}
COMMAND_LINES = 60
FUNCTION_LINES = 104  # of the longest function, with its docstring
# A reader has to look up what these are; the noun of the thing says it.
NAMELESS = {
    "asked", "begun", "found", "given", "gone", "had", "made", "own", "there", "took", "whole",
}  # fmt: skip
TOTAL_LINES = 51_541
BUDGET = {  # room → lines of Python, generated files left out
    "": 13, "base": 281, "system": 1_349, "journal": 498, "option": 64, "algorithms": 1_918,
    "cli": 776, "model": 4_575, "train": 3_512, "observe": 2_436, "fleet": 3_277, "engines": 4_720,
    "sandbox": 699, "workers": 392, "environments": 653, "plan": 804, "rewards": 1_669,
    "rollout": 3_625, "agents": 3_741,
    "launch": 1_834, "mismatch": 745, "evaluation": 811, "doctor": 1_100, "debugger": 440,
    "config": 463, "areal": 622, "run": 6_857, "tinker": 1_168, "commands": 1_111,
    "rlx_torch": 2_010,
}  # fmt: skip

# They build the trainer; the rest of the room sees its contract alone.
TRAINERS = ("run/jax_trainer.py", "run/torch_trainer.py", "run/checkpoint_tensors.py")
OF_JAX = HEAVY | {
    f"rlx.train.{name}" for name in ("update", "learner", "step_metrics")
}  # fmt: skip

FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def room_of(path: str) -> str:
    """The room of a file given relative to the package, `fleet/client.py` → `fleet`.

    `python -m rlx.doctor`, and the others of ROOM_COMMANDS, are in the directories of rooms.
    """
    if path in [f"{room}/__main__.py" for room in ROOM_COMMANDS]:
        return "commands"
    first = path.split("/")[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(source: str) -> set[str]:
    """Dotted names of every module that a source imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            # `from rlx import doctor` imports rlx.doctor; a name that is no module changes no room.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def downward(path: str, source: str) -> list[str]:
    """The imports of a file that break the order of rooms."""
    wrong = []
    for name in imports(source):
        parts = name.split(".")
        if parts[0] != "rlx":
            continue
        # A bare `rlx` name such as `rlx.__version__` belongs to the package itself.
        room = parts[1] if len(parts) > 1 and parts[1] in LEVEL else ""
        if room != room_of(path) and LEVEL[room] >= LEVEL[room_of(path)]:
            wrong.append(name)
    return sorted(wrong)


def light(path: str) -> bool:
    """Whether a file may import neither JAX nor torch."""
    return path not in ENGINES and (path in LIGHT_FILES or room_of(path) in LIGHT_ROOMS)


def module(path: str) -> str:
    """`fleet/client.py` → `rlx.fleet.client`."""
    return ".".join(["rlx", *path.removesuffix(".py").split("/")]).removesuffix(".__init__")


def test_the_checks_see_what_they_forbid():
    assert downward("train/update.py", "from rlx.fleet import client") == ["rlx.fleet.client"]
    assert downward("algorithms/losses.py", "def f():\n  import rlx.observe.metrics") == [
        "rlx.observe.metrics"
    ]
    assert downward("fleet/client.py", "from rlx.run import loop") == ["rlx.run.loop"]
    assert downward("serve.py", "from rlx import doctor, main") == ["rlx.main"]
    assert downward("run/loop.py", "from rlx.train.update import JaxUpdate") == []
    with pytest.raises(AssertionError, match="relative import"):
        imports("from . import base")
    assert light("rollout/executor.py")
    assert light("train/packing.py")
    assert not light("train/update.py")


@pytest.mark.parametrize("path", FILES)
def test_a_file_imports_only_from_rooms_before_its_own(path):
    assert room_of(path) in LEVEL, f"rlx/{path} is in no room; move it, or give it a place in ORDER"
    wrong = downward(path, (PACKAGE / path).read_text())
    assert not wrong, f"rlx/{path} imports {wrong}; move the code to a room before that one"


@pytest.mark.parametrize("path", [p for p in FILES if light(p)])
def test_a_light_file_names_no_heavy_module(path):
    heavy = {name.split(".")[0] for name in imports((PACKAGE / path).read_text())} & HEAVY
    assert not heavy, f"rlx/{path} imports {sorted(heavy)}; servers and workers must start without"


def test_importing_every_light_file_loads_no_heavy_module():
    """Also through what it imports; each module that drags one in is named."""
    modules = [module(p) for p in FILES if light(p) and not p.endswith("__main__.py")]
    program = (
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "    if heavy: found[name] = heavy; break\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("rlx.main", {"grpc", "rich", "packaging"} | HEAVY),  # until servers start
        ("rlx.serve, rlx.engines.server, rlx.engines.jax.jax_engine", HEAVY - {"jax", "jaxlib"}),
        ("rlx.run.loop, rlx.run.jax_trainer", HEAVY - {"jax", "jaxlib", "flax", "optax"}),
    ],
)
def test_a_run_starts_without_what_it_does_not_use(modules, without):
    """Each of these takes tenths of a second, on the way to the first step."""
    idle = {"transformers", "tokenizers", "aiohttp", "openai", "anthropic", "ray", "pandas", "PIL"}
    idle |= {"matplotlib", "datasets", "scipy", "jinja2"}
    program = f"import sys, {modules}\nprint(*sorted({without | idle!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) == "run" and p not in TRAINERS])
def test_a_run_sees_its_trainer_through_the_contract_alone(path):
    """So that one in PyTorch takes the place of JAX's."""
    names = {".".join(name.split(".")[:3]) for name in imports((PACKAGE / path).read_text())}
    found = {name for name in names if name in OF_JAX or name.split(".")[0] in HEAVY}
    assert not found, f"rlx/{path} imports {sorted(found)}; ask for it in rlx/train/contract.py"


@pytest.mark.torch
def test_a_run_with_the_trainer_in_torch_imports_no_jax():
    """Which would take half a second, a hundred megabytes, and three quarters of a GPU."""
    program = (
        "import sys, rlx.main, rlx.run.loop, rlx.run.config_checks, rlx.run.torch_trainer\n"
        "assert 'torch' in sys.modules\n"
        "assert not {'jax', 'flax', 'optax', 'orbax'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_a_trainer_does_not_know_the_other_ones_library():
    """But dry_call, which tries a user's loss with either."""
    of_torch = {"torch", "rlx_torch"}
    forbidden = {PACKAGE / "run/jax_trainer.py": of_torch}
    forbidden |= dict.fromkeys((PACKAGE / "train").glob("*.py"), of_torch)
    del forbidden[PACKAGE / "train/dry_call.py"]
    forbidden[PACKAGE / "run/torch_trainer.py"] = HEAVY - of_torch
    forbidden |= dict.fromkeys((PACKAGE.parent / "rlx_torch").glob("*.py"), HEAVY - of_torch)
    for path, heavy in forbidden.items():
        found = {name.split(".")[0] for name in imports(path.read_text())} & heavy
        assert not found, f"{path} imports {sorted(found)}"


def test_every_command_is_one_of_the_program_rlx():
    named = {name for name, _ in rlx.__main__.COMMANDS.values()}
    assert named == {f"rlx.{name}" for name in (*COMMANDS, *ROOM_COMMANDS)} - {"rlx.__main__"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_short(command):
    lines = len((PACKAGE / f"{command}.py").read_text().splitlines())
    lines -= len(rlx.__main__.COMMANDS) * (command == "__main__")  # its table is no logic
    assert lines <= COMMAND_LINES, f"rlx/{command}.py has {lines} lines; commands hold no logic"


def sources() -> dict[str, str]:
    """The text of each file of the package, generated ones left out."""
    return {p: (PACKAGE / p).read_text() for p in FILES if "_pb2" not in p}


def lines_by_room() -> dict[str, int]:
    """Lines of Python of each room; commands are one room, `commands`, and rlx_torch another."""
    lines: Counter[str] = Counter()
    for path, source in sources().items():
        room = room_of(path)
        lines["commands" if room in COMMANDS else room] += len(source.splitlines())
    for path in (PACKAGE.parent / "rlx_torch").rglob("*.py"):
        lines["rlx_torch"] += len(path.read_text().splitlines())
    return dict(lines)


def test_every_room_stays_within_its_lines():
    lines = lines_by_room()
    over = {room: n for room, n in lines.items() if n > BUDGET.get(room, 0)}
    assert not over, f"above the budget: {over}; delete, or say in the commit why the room grows"
    del lines["areal"]  # an importer, outside the total
    assert sum(lines.values()) <= TOTAL_LINES


def test_no_function_is_long():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = {
        f"{path}:{node.lineno} {node.name}"
        for path, source in sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, functions) and node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert not long, f"functions of more than {FUNCTION_LINES} lines: {sorted(long)}; divide them"


def test_module_names_are_unique():
    """A name without its room says which file is meant."""
    names = Counter(Path(p).stem for p in FILES if not Path(p).stem.startswith("__"))
    twice = {name for name, count in names.items() if count > 1}
    assert not twice, f"modules of one name: {sorted(twice)}; give each its own"


def test_public_classes_have_unique_names():
    names = Counter(
        node.name
        for source in sources().values()
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    twice = {name for name, count in names.items() if count > 1}
    assert not twice, f"classes of one name: {sorted(twice)}; one noun, one type"


def local_names(source: str) -> set[str]:
    """Return the names of variables and parameters in a source."""
    nodes = [*ast.walk(ast.parse(source))]
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in nodes if isinstance(n, ast.arg)}


def test_the_names_of_a_source_are_seen():
    assert local_names("def f(a, *, b): c = [d for d in a]") == set("abcd")


def test_variables_are_named_by_nouns():
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "rlx_torch").rglob("*.py")]
    names = {path: local_names(path.read_text()) & NAMELESS for path in files}
    assert {path: found for path, found in names.items() if found} == {}


def test_rooms_take_dataclasses_not_the_raw_config():
    """A line that takes a ConfigDict does not say which keys it depends on."""
    seen = {
        path
        for path, source in sources().items()
        if room_of(path) not in ("config", "cli", "run", *COMMANDS) and "ConfigDict" in source
    }
    assert not seen, f"{sorted(seen)} know the run's config; pass what they need"


def test_every_file_is_reached_from_a_command_of_the_readme():
    """A feature that nobody reaches from a command is not there."""
    texts, names = sources(), {module(p): p for p in FILES}
    commands = set(re.findall(r"python -m (rlx\.\w+)", README.read_text()))
    todo = {names.get(f"{c}.__main__") or names[c] for c in commands} | {"__main__.py"}
    reached: set[str] = set()
    while todo:
        path = todo.pop()
        reached.add(path)
        tree = ast.parse(texts.get(path, ""))
        # Processes are started by name (`rlx.agents.worker`) or beside the file of a module.
        named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} | imports(
            texts.get(path, "")
        )
        for name in filter(lambda n: isinstance(n, str) and n.startswith("rlx"), named):
            while name and name not in names:
                name = name.rpartition(".")[0]
            if name and names[name] not in reached:
                todo.add(names[name])
    lost = {p for p in texts if not p.endswith("__init__.py")} - reached
    assert not lost, f"{sorted(lost)} are reached from no command; wire them or delete them"
