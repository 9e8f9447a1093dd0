"""Check declared dependencies: installed, in their version bounds, importable.

Imports run in separate processes with a time limit, because a broken package may crash or hang.
"""

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlx.base import install
from rlx.cli.findings import Finding
from rlx.workers.worker_process import SupervisedProcess

IMPORT_SECONDS = 180.0  # timeout of an import; torch and vLLM are slow on a busy machine

_CHILD = """
import importlib, sys
pipe, *modules = sys.argv[1:]
for name in modules:
    try:
        importlib.import_module(name)
    except BaseException as error:
        with open(int(pipe), "w") as file:
            file.write(f"{type(error).__name__}: {error}")
        break
"""


def required_packages(distribution: str, extra: str = "") -> list[Requirement]:
    """Return what an installed distribution requires here, or what one of its extras adds."""

    def holds(requirement: Requirement, extra: str) -> bool:
        return not requirement.marker or requirement.marker.evaluate({"extra": extra})

    every = [Requirement(text) for text in metadata.requires(distribution) or ()]
    return [r for r in every if holds(r, extra) and not (extra and holds(r, ""))]


def unfit(requirement: Requirement) -> str:
    """Return why a package, or one of the extras required of it, is not as required, or ""."""
    name = requirement.name
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is installed, wanted {_text(requirement)}"
    parts = [
        part for extra in sorted(requirement.extras) for part in required_packages(name, extra)
    ]
    return next((f"{part.name}: {why}" for part in parts if (why := unfit(part))), "")


def imports(modules: Sequence[str], seconds: float = IMPORT_SECONDS) -> dict[str, str]:
    """Return module → why its import fails in another process; "" if it works."""
    names = list(dict.fromkeys(modules))
    # One process for all is fast; if it fails, each module gets its own.
    if not _import_error(names, seconds):
        return dict.fromkeys(names, "")
    return {name: _import_error([name], seconds) for name in names}


def _import_error(modules: Sequence[str], seconds: float) -> str:
    """Return why a process that imports `modules` fails; "" if it does not."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as report:
        process = SupervisedProcess(  # some imports start processes
            [sys.executable, "-c", _CHILD, str(report.fileno()), *modules],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(report.fileno(),),
        )  # fmt: skip
        code, waited = process.end(seconds), time.monotonic() - start
        report.seek(0)
        words = " ".join(report.read().split())[:200]
    if code and waited >= seconds:
        return f"no end after {seconds:g} s"
    return words or (f"ends Python with {code}" if code else "")


def check(distribution: str = "rlx", needed: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield a row for each broken package (`needed` extras too), all others, and extras."""
    try:
        dependencies = required_packages(distribution)
    except metadata.PackageNotFoundError:
        yield Finding("packages", "rlx", "warning", "not installed: dependencies are unknown",
                      "pip install -e . in its directory")  # fmt: skip
        return
    names = metadata.metadata(distribution).get_all("Provides-Extra") or []
    extras = {name: required_packages(distribution, name) for name in names}
    modules = modules_by_name()
    every = [r for requirements in extras.values() for r in requirements]
    dependencies += [r for r in every if modules.get(canonicalize_name(r.name)) in needed]
    by_name = {r.name: r for r in dependencies}
    wrong = {name: why for name, r in by_name.items() if (why := unfit(r))}
    tried = {name: module for name in by_name if name not in wrong
             if (module := modules.get(canonicalize_name(name)))}  # fmt: skip
    start, errors = time.monotonic(), imports([*tried.values()])
    seconds = time.monotonic() - start
    for name, module in tried.items():
        if errors[module]:
            wrong[name] = f"{metadata.version(name)} cannot be imported: {errors[module]}"
    for name, why in wrong.items():
        again = "--force-reinstall " * (name in tried)
        remedy = f"pip install {again}'{_text(by_name[name])}'"
        yield Finding("packages", name, "problem", why, remedy)
    good = [f"{name} {metadata.version(name)}" for name in by_name if name not in wrong]
    versions = ", ".join([f"Python {platform.python_version()}", *good])
    summary = f"{len(good)} of {len(by_name)} installed, in bounds and importable ({seconds:.0f} s)"
    level, remedy = ("warning", "see the rows above") if wrong else ("ok", "")
    yield Finding("packages", "dependencies", level, f"{summary}: {versions}", remedy)
    present = [name for name, rs in extras.items() if rs and not any(map(unfit, rs))]
    absent = [name for name in extras if name not in present]
    summary = f"{', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    yield Finding("packages", "extras", "ok", f"{summary}; to install one: {install('NAME')}")


def modules_by_name() -> dict[str, str]:
    """Return distribution → the module to import: the one of its name, else the first."""
    modules: dict[str, str] = {}
    for module, distributions in sorted(metadata.packages_distributions().items()):
        for name in map(canonicalize_name, distributions):
            namesake = module.lower() == name.replace("-", "_")
            if module.isidentifier() and module[0] != "_" and (namesake or name not in modules):
                modules[name] = module
    return modules


def _text(requirement: Requirement) -> str:
    return str(requirement).partition(";")[0].strip()  # without its marker
