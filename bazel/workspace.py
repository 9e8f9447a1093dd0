"""Write WORKSPACE and MODULE.bazel from one list: python bazel/workspace.py

WORKSPACE is for Bazel 4 without a network (Debian's bazel-bootstrap); bazel/stubs replaces its
downloads. MODULE.bazel is for current Bazel, which has a registry, and Python rules as a module.
tests/bazel_test.py checks the committed files.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "rlx_source"  # if it were rlx, `import rlx` would find the repository's root
STUBS = "bazel/stubs"
# name → version in the registry; those without a version are needed only by Bazel 4
REPOSITORIES = {
    "rules_python": "1.8.0",
    "rules_cc": "",
    "rules_java": "",
    "remote_coverage_tools": "",
}
HEAD = "# Written by bazel/workspace.py.\n"


def workspace() -> str:
    """Return WORKSPACE, whose repositories are all local."""
    stub = 'local_repository(\n    name = "{}",\n    path = "{}",\n)'
    parts = [f'workspace(name = "{NAME}")', *(stub.format(name, STUBS) for name in REPOSITORIES)]
    return HEAD + "\n\n".join(parts) + "\n"


def module() -> str:
    """Return MODULE.bazel; Python is `python3` of the environment, as in WORKSPACE."""
    dependencies = [
        f'bazel_dep(name = "{name}", version = "{version}")'
        for name, version in REPOSITORIES.items()
        if version
    ]
    python = 'register_toolchains("@rules_python//python/runtime_env_toolchains:all")'
    return HEAD + "\n\n".join([f'module(name = "{NAME}")', *dependencies, python]) + "\n"


FILES = {"WORKSPACE": workspace, "MODULE.bazel": module}

if __name__ == "__main__":
    for file, written in FILES.items():
        (ROOT / file).write_text(written())
