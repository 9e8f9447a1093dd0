"""The rooms of the package import upwards only, and the light ones stay light.

The order is the table of rooms in AGENTS.md: a file imports from its own room or from rooms before
it. Rooms that servers, workers and the planner share import neither JAX nor torch.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlx

PACKAGE = Path(rlx.__file__).parent
COMMANDS = ("main", "serve", "convert", "report", "compare", "evaluate", "debug_workflow")
ORDER = (
    "", "base", "config", "cli", "algorithms", "model", "train", "observe", "fleet", "engines",
    "rewards", "rollout", "agents", "launch", "mismatch", "evaluation", "plan", "doctor", "run",
)  # fmt: skip
LEVEL = {room: level for level, room in enumerate(ORDER)} | dict.fromkeys(COMMANDS, 99)
LIGHT_ROOMS = (
    "", "base", "config", "cli", "observe", "fleet", "engines", "rewards", "rollout", "agents",
    "launch", "plan",
)  # fmt: skip
LIGHT_FILES = (
    "algorithms/presets.py", "train/packing.py", "model/compile_cache.py", "model/model_config.py",
    "model/directory.py", "model/replaced.py", "model/tensors.py",
)  # fmt: skip
ENGINES = (  # programs of JAX and torch in a light room
    "engines/jax/decode.py", "engines/jax/jax_engine.py", "engines/jax/programs.py",
    "engines/jax/sampling.py", "engines/jax/scoring.py", "engines/vllm/openai_http.py",
    "engines/vllm/vllm_engine.py", "engines/vllm/vllm_start.py", "engines/vllm/vllm_worker.py",
    "launch/teacher.py",
)  # fmt: skip
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax", "chex", "torch", "vllm", "rlx_torch"}
COMMAND_LINES = 82

OWED = {  # imports that point down and are to go
    "cli/command.py": ["rlx.doctor.failures"],
    "doctor/capacity.py": ["rlx.run.inputs.has_servers"],
    "doctor/run_config.py": ["rlx.run.inputs", "rlx.run.inputs.Inputs"],
    "evaluation/evaluations.py": [
        "rlx.run.export.checkpoint_to_hf", "rlx.run.inputs.load_tokenizer",
        "rlx.run.inputs.patience",
    ],
    "evaluation/held_out.py": [
        "rlx.run.inputs.Inputs", "rlx.run.inputs.evaluation_sampling", "rlx.run.inputs.has_servers",
        "rlx.run.run_records",
    ],
    "launch/serving.py": ["rlx.run.inputs.server_options"],
    "mismatch/gate.py": ["rlx.run.inputs.Inputs", "rlx.run.inputs.training_sampling"],
}  # fmt: skip

FILES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def room_of(path: str) -> str:
    """The room of a file given relative to the package, `fleet/client.py` → `fleet`."""
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
    return (
        path not in ENGINES
        and path not in OWED
        and (path in LIGHT_FILES or room_of(path) in LIGHT_ROOMS)
    )


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
    assert downward("run/loop.py", "from rlx.train.update import make_update") == []
    with pytest.raises(AssertionError, match="relative import"):
        imports("from . import base")
    assert light("rollout/executor.py")
    assert light("train/packing.py")
    assert not light("train/update.py")


@pytest.mark.parametrize("path", FILES)
def test_a_file_imports_only_from_rooms_before_its_own(path):
    assert room_of(path) in LEVEL, f"rlx/{path} is in no room; move it, or give it a place in ORDER"
    wrong = downward(path, (PACKAGE / path).read_text())
    assert wrong == OWED.get(path, []), (
        f"rlx/{path} imports {wrong}; move the code to a room before that one"
    )


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


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_short(command):
    lines = len((PACKAGE / f"{command}.py").read_text().splitlines())
    assert lines <= COMMAND_LINES, f"rlx/{command}.py has {lines} lines; commands hold no logic"
