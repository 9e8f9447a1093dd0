"""Declared dependencies against what is installed: versions, and whether an import works.

Imports run in processes of their own with a time limit, so that a broken package can neither end
nor hang the one who asks.
"""

import importlib.util
import json
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from threading import Timer
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlx.base import install
from rlx.doctor.findings import Finding
from rlx.rewards.worker_process import SupervisedProcess

IMPORT_SECONDS = 180.0  # of one package; torch or vLLM on a busy machine

_CHILD = """
import importlib, json, sys
def say(**record):
    print("\\n" + json.dumps(record), flush=True)
for name in sys.argv[1:]:
    say(begun=name)
    try:
        importlib.import_module(name)
    except BaseException as error:
        say(failed=name, why=f"{type(error).__name__}: {error}")
    else:
        say(done=name)
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A declared requirement and what is installed of it.

    Attributes:
      requirement: as declared, without its marker.
      version: installed; empty where it is not.
      fits: the version is inside the bounds.
      module: what to import; empty where nothing is installed.
    """

    requirement: str
    name: str
    version: str
    fits: bool
    module: str


def declared(distribution: str = "rlx") -> dict[str, list[Requirement]]:
    """Extra → its requirements that hold on this machine; "" has those that are always needed.

    Where the distribution is run from its source, pyproject.toml says it: what was installed may be
    older.

    Raises:
      metadata.PackageNotFoundError: the distribution is neither.
    """
    project = _project(distribution)
    if project:
        needed = project.get("dependencies", [])
        groups = project.get("optional-dependencies", {})
        out = {"": _applying(map(Requirement, needed))}
        return out | {name: _applying(map(Requirement, rs)) for name, rs in groups.items()}
    every = [Requirement(text) for text in metadata.requires(distribution) or []]
    extras = metadata.metadata(distribution).get_all("Provides-Extra") or []
    out = {"": _applying(every)}
    for extra in extras:
        out[extra] = [r for r in _applying(every, extra) if r not in out[""]]
    return out


def _project(distribution: str) -> dict[str, Any]:
    """The table `project` of the pyproject.toml beside the package; empty where there is none."""
    found = importlib.util.find_spec(distribution)
    if not found or not found.origin:
        return {}
    try:
        text = (Path(found.origin).parents[1] / "pyproject.toml").read_text()
    except OSError:
        return {}
    project = tomllib.loads(text).get("project", {})
    return project if project.get("name") == distribution else {}


def _applying(requirements: Iterable[Requirement], extra: str = "") -> list[Requirement]:
    """Those whose marker holds on this machine, with `extra` asked for."""
    return [r for r in requirements if not r.marker or r.marker.evaluate({"extra": extra})]


def inspect(requirement: Requirement) -> list[Package]:
    """The package of a requirement, and those that its own extras (`jax[cuda12]`) add."""
    try:
        found = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return [Package(_text(requirement), requirement.name, "", False, "")]
    fits = requirement.specifier.contains(found.version, prereleases=True)
    out = [Package(_text(requirement), requirement.name, found.version, fits, module_of(found))]
    every = [Requirement(text) for text in found.requires or ()]
    plain = _applying(every)
    for extra in sorted(requirement.extras):
        out += [p for r in _applying(every, extra) if r not in plain for p in inspect(r)]
    return out


def module_of(found: metadata.Distribution) -> str:
    """What to import of a distribution: its topmost package, by its own name where it has several;
    empty for one without modules (of data, or plugins alone)."""
    wanted = canonicalize_name(found.name).replace("-", "_")
    best: tuple[int, int, str] | None = None
    for file in found.files or ():
        path = PurePosixPath(str(file))
        if path.name == "__init__.py":
            parts = path.parts[:-1]
        elif len(path.parts) == 1 and path.suffix == ".py":
            parts = (path.stem,)
        else:
            continue
        name = ".".join(parts)
        if not parts or not all(p.isidentifier() for p in parts) or parts[0].startswith("_"):
            continue
        rank = (len(parts), name.lower().replace(".", "_") != wanted, name)
        best = rank if best is None or rank < best else best
    return best[2] if best else _editable_module(found, wanted)


def _editable_module(found: metadata.Distribution, wanted: str) -> str:
    return wanted if not found.files or "direct_url.json" in {f.name for f in found.files} else ""


def imports(
    modules: Sequence[str], seconds: float = IMPORT_SECONDS, python: str = sys.executable
) -> dict[str, str]:
    """Imports modules one after the other in another process.

    Returns:
      module → "" where it works, else why not. One that ends or hangs the process costs the
      others nothing: they go on in a new one.
    """
    out: dict[str, str] = {}
    waiting = list(dict.fromkeys(modules))
    while waiting:
        for name, why in _import_some(waiting, seconds, python):
            out[name] = why
        waiting = [name for name in waiting if name not in out]
    return out


def _import_some(modules: list[str], seconds: float, python: str) -> Iterator[tuple[str, str]]:
    """(module, why it fails or "") until the process ends; the one it ended in comes last."""
    process = SupervisedProcess(  # some imports start processes
        [python, "-c", _CHILD, *modules], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    current, hung, timer = modules[0], False, Timer(0, lambda: None)

    def stop() -> None:
        nonlocal hung
        hung = True
        process.stop()

    def watch() -> Timer:
        timer = Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        return timer

    assert process.stdout
    done: set[str] = set()
    timer = watch()
    try:
        for text in process.stdout:
            record = _record(text)
            if (name := record.get("begun")) in modules:
                timer.cancel()
                current, timer = name, watch()
            elif (name := record.get("done") or record.get("failed")) in modules:
                done.add(name)
                yield name, " ".join(str(record.get("why", "")).split())[:200]
        code = process.end(seconds)
    finally:
        timer.cancel()
        process.end()
        process.stdout.close()
    if current not in done:
        yield current, f"no end after {seconds:g} s" if hung else f"ends Python with {code}"


def _record(text: str) -> dict:
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def check(
    distribution: str = "rlx", needed: Sequence[str] = (), everything: bool = True
) -> Iterator[Finding]:
    """A row for the dependencies, one for every one that does not work, one for each extra.

    Args:
      needed: modules of extras, without which there is a problem where else there would be none.
      everything: whether extras that have none of `needed` are looked at too.
    """
    try:
        groups = declared(distribution)
    except metadata.PackageNotFoundError:
        yield Finding("packages", "rlx", "warning", "not installed, so nothing says what it needs",
                      "pip install -e . in its directory")  # fmt: skip
        return
    found = {extra: [p for r in rs for p in inspect(r)] for extra, rs in groups.items()}
    if not everything:
        wanted = {e for e, packages in found.items() if any(p.module in needed for p in packages)}
        found = {extra: found[extra] for extra in ("", *sorted(wanted))}
    begun = time.monotonic()
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        jobs = {
            extra: pool.submit(imports, [p.module for p in packages if p.module])
            for extra, packages in found.items()
            if not extra or all(p.version for p in packages)
        }
        works = {extra: job.result() for extra, job in jobs.items()}
    yield from _dependencies(found[""], works[""], time.monotonic() - begun)
    for extra, packages in found.items():
        if extra:
            yield _extra(extra, packages, works.get(extra, {}), needed)


def _dependencies(
    packages: Sequence[Package], works: Mapping[str, str], seconds: float
) -> Iterator[Finding]:
    bad = list(_complaints(packages, works))
    for name, found, remedy in bad:
        yield Finding("packages", name, "problem", found, remedy)
    good = len(packages) - len(bad)
    wrong = {name for name, _, _ in bad}
    versions = ", ".join(f"{p.name} {p.version}" for p in packages if p.name not in wrong)
    found = f"{good} of {len(packages)} installed, in bounds and importable ({seconds:.0f} s)"
    level, remedy = ("warning", "see above") if bad else ("ok", "")
    what = f"{found}: Python {platform.python_version()}, {versions}"
    yield Finding("packages", "dependencies", level, what, remedy)


def _extra(
    extra: str, packages: Sequence[Package], works: Mapping[str, str], needed: Sequence[str]
) -> Finding:
    missing = [p.name for p in packages if not p.version]
    if not packages:
        return Finding("packages", f"[{extra}]", "absent", "nothing of it is for this system")
    if missing:
        others = ", ".join(f"{p.name} {p.version}" for p in packages if p.version)
        found = f"without {', '.join(missing)}" + (f"; {others} installed" if others else "")
        return Finding("packages", f"[{extra}]", "absent", f"{found}; to have it: {install(extra)}")
    bad = list(_complaints(packages, works))
    if bad:
        found = "; ".join(f"{name}: {what}" for name, what, _ in bad)
        wrong = {name for name, _, _ in bad}
        asked = any(p.module in needed for p in packages if p.name in wrong)
        level = "problem" if asked else "warning"
        return Finding("packages", f"[{extra}]", level, found, bad[0][2])
    versions = ", ".join(f"{p.name} {p.version}" for p in packages)
    return Finding("packages", f"[{extra}]", "ok", versions)


def _complaints(
    packages: Iterable[Package], works: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """(name, what is wrong, what to do) of each package that does not work."""
    for p in packages:
        if not p.version:
            yield p.name, "not installed", f"pip install '{p.requirement}'"
        elif not p.fits:
            found = f"{p.version} is installed, wanted {p.requirement}"
            yield p.name, found, f"pip install '{p.requirement}'"
        elif why := works.get(p.module, ""):
            again = f"pip install --force-reinstall '{p.requirement}'"
            yield p.name, f"{p.version} cannot be imported: {why}", again


def _text(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"
