"""Check declared dependencies: installed, in their version bounds, importable.

Imports run in separate processes with a time limit, because a broken package may crash or hang.
"""

import dataclasses
import importlib.util
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlx.base import install
from rlx.doctor.findings import Finding
from rlx.workers.worker_process import SupervisedProcess

OTHER = "extras"  # area of extras that a run does not need
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


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """A declared requirement and its installed version."""

    requirement: str  # as declared, without its marker
    name: str
    version: str  # installed version; empty if not installed
    fits: bool  # whether the version is within bounds
    module: str  # module to import; empty if not installed


def declared(distribution: str = "rlx") -> dict[str, list[Requirement]]:
    """Return extra → its requirements on this machine; "" maps to the mandatory ones.

    Raises:
      metadata.PackageNotFoundError: the distribution is neither installed nor run from source.
    """
    if project := _project(distribution):  # the metadata of an editable install may be older
        groups = {"": project.get("dependencies", []), **project.get("optional-dependencies", {})}
        return {extra: _applying(map(Requirement, texts)) for extra, texts in groups.items()}
    every = [Requirement(text) for text in metadata.requires(distribution) or []]
    extras = metadata.metadata(distribution).get_all("Provides-Extra") or []
    base = _applying(every)
    own = {extra: [r for r in _applying(every, extra) if r not in base] for extra in extras}
    return {"": base, **own}


def _project(distribution: str) -> dict[str, Any]:
    """Return the table `project` of the pyproject.toml above the package; {} without one."""
    found = importlib.util.find_spec(distribution)
    project: dict[str, Any] = {}
    if found and found.origin:
        with suppress(OSError):
            text = (Path(found.origin).parents[1] / "pyproject.toml").read_text()
            project = tomllib.loads(text).get("project", {})
    return project if project.get("name") == distribution else {}


def _applying(requirements: Iterable[Requirement], extra: str = "") -> list[Requirement]:
    """Return the requirements whose marker holds on this machine when `extra` is installed."""
    return [r for r in requirements if not r.marker or r.marker.evaluate({"extra": extra})]


def inspect(requirement: Requirement) -> list[Package]:
    """Return the package of a requirement, and the packages that its extras (`jax[cuda12]`) add."""
    name, text = requirement.name, str(requirement).partition(";")[0].strip()
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return [Package(text, name, "", False, "")]
    fits = requirement.specifier.contains(found.version, prereleases=True)
    out = [Package(text, name, found.version, fits, module_of(found))]
    every = [Requirement(text) for text in found.requires or ()]
    plain = _applying(every)
    for extra in sorted(requirement.extras):
        out += [p for r in _applying(every, extra) if r not in plain for p in inspect(r)]
    return out


def module_of(found: metadata.Distribution) -> str:
    """Return the module to import of a distribution: its topmost package, preferably its namesake.

    Returns "" for a distribution without modules.
    """
    wanted = canonicalize_name(found.name).replace("-", "_")
    names = []
    for file in found.files or ():
        path = PurePosixPath(str(file))
        parts = path.parts[:-1] if path.name == "__init__.py" else (path.stem,)
        if path.suffix != ".py" or (path.name != "__init__.py" and len(path.parts) > 1):
            continue
        if parts and all(p.isidentifier() for p in parts) and not parts[0].startswith("_"):
            names.append(".".join(parts))
    if names:
        return min(names, key=lambda n: (n.count("."), n.lower().replace(".", "_") != wanted, n))
    editable = not found.files or "direct_url.json" in {file.name for file in found.files}
    return wanted if editable else ""


def imports(modules: Sequence[str], seconds: float = IMPORT_SECONDS) -> dict[str, str]:
    """Return module → why its import fails in another process; "" if it works."""
    names = list(dict.fromkeys(modules))
    # One process for all is fast; if it fails, each module gets its own.
    if not _import_error(names, seconds):
        return dict.fromkeys(names, "")
    return {name: _import_error([name], seconds) for name in names}


def _import_error(modules: Sequence[str], seconds: float) -> str:
    """Return why a process that imports `modules` fails; "" if it does not."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as report:
        process = SupervisedProcess(  # some imports start processes
            [sys.executable, "-c", _CHILD, str(report.fileno()), *modules],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(report.fileno(),),
        )  # fmt: skip
        code, waited = process.end(seconds), time.monotonic() - begun
        report.seek(0)
        words = " ".join(report.read().split())[:200]
    if code and waited >= seconds:
        return f"no end after {seconds:g} s"
    return words or (f"ends Python with {code}" if code else "")


def check(
    distribution: str = "rlx", needed: Sequence[str] = (), everything: bool = True
) -> Iterator[Finding]:
    """Yield a row for each broken dependency, one for all others, and one for each extra.

    Extras that the run does not need have the area OTHER, if `everything` is checked; absent ones
    share a row. Failures of `needed` modules are problems, others warnings.
    """
    try:
        groups = declared(distribution)
    except metadata.PackageNotFoundError:
        yield Finding("packages", "rlx", "warning", "not installed: dependencies are unknown",
                      "pip install -e . in its directory")  # fmt: skip
        return
    found = {extra: [p for r in rs for p in inspect(r)] for extra, rs in groups.items()}
    if not everything:
        wanted = {e for e, packages in found.items() if any(p.module in needed for p in packages)}
        found = {extra: found[extra] for extra in ("", *sorted(wanted))}
    modules = {
        extra: [p.module for p in packages if p.module]
        for extra, packages in found.items()
        if not extra or all(p.version for p in packages)
    }
    begun, works = time.monotonic(), dict[str, str]()
    with ThreadPoolExecutor(len(found)) as pool:
        for each in pool.map(imports, modules.values()):
            works |= each
    seconds = time.monotonic() - begun
    yield from _dependencies(found.pop(""), works, seconds)
    absent = []
    for extra, packages in found.items():
        row = _extra(extra, packages, works, needed)
        if any({p.module, p.name} & {*needed} for p in packages):
            yield row
        elif row.level == "absent":
            absent.append(row.name)
        else:
            yield dataclasses.replace(row, area=OTHER)
    if absent:
        names = f"{', '.join(absent)}; to install one: {install('NAME')}"
        yield Finding(OTHER, "not installed", "absent", names)


def _dependencies(
    packages: Sequence[Package], works: Mapping[str, str], seconds: float
) -> Iterator[Finding]:
    bad = _complaints(packages, works)
    for name, (found, remedy) in bad.items():
        yield Finding("packages", name, "problem", found, remedy)
    good = [p for p in packages if p.name not in bad]
    found = (
        f"{len(good)} of {len(packages)} installed, in bounds and importable ({seconds:.0f} s): "
        f"Python {platform.python_version()}, {_versions(good)}"
    )
    level, remedy = ("warning", "see the rows above") if bad else ("ok", "")
    yield Finding("packages", "dependencies", level, found, remedy)


def _extra(
    extra: str, packages: Sequence[Package], works: Mapping[str, str], needed: Sequence[str]
) -> Finding:
    name, bad = f"[{extra}]", _complaints(packages, works)
    if not packages:
        return Finding("packages", name, "absent", "has no packages for this system")
    if missing := [p.name for p in packages if not p.version]:
        others = _versions(p for p in packages if p.version)
        found = f"without {', '.join(missing)}" + (f"; {others} installed" if others else "")
        return Finding("packages", name, "absent", f"{found}; to install it: {install(extra)}")
    if bad:
        found = "; ".join(f"{each}: {what}" for each, (what, _) in bad.items())
        required = any(p.module in needed for p in packages if p.name in bad)
        remedy = next(iter(bad.values()))[1]
        return Finding("packages", name, "problem" if required else "warning", found, remedy)
    return Finding("packages", name, "ok", _versions(packages))


def _versions(packages: Iterable[Package]) -> str:
    return ", ".join(f"{p.name} {p.version}" for p in packages)


def _complaints(
    packages: Iterable[Package], works: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return name → (problem, remedy) of each broken package."""
    out = {}
    for p in packages:
        if not p.version:
            out[p.name] = "not installed", f"pip install '{p.requirement}'"
        elif not p.fits:
            found = f"{p.version} is installed, wanted {p.requirement}"
            out[p.name] = found, f"pip install '{p.requirement}'"
        elif why := works.get(p.module, ""):
            again = f"pip install --force-reinstall '{p.requirement}'"
            out[p.name] = f"{p.version} cannot be imported: {why}", again
    return out
