"""Dependencies: declared, installed, importable. The packages are real files, some of them bad."""

import time

import pytest

from rlx.doctor import packages

MODULES = {
    "good": "",
    "hangs": "import time; time.sleep(60)",
    "ends": "import os; os._exit(7)",
    "raises": "raise RuntimeError('built for\\n another CUDA')",
    "talks": "print('{\"done\": 1}'); print('[1]')",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of packages, seen here and in child processes; `install` adds a distribution."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def install(name, version, source="", requires=(), extras=()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {text}" for text in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")

    return install


def test_one_bad_import_costs_the_others_nothing(site):
    for name, source in MODULES.items():
        site(name, "1.0", source)
    begun = time.monotonic()
    found = packages.imports([*MODULES, "good"], seconds=3)
    assert time.monotonic() - begun < 30
    assert found.pop("hangs") == "no end after 3 s"
    assert found.pop("ends") == "ends Python with 7"
    assert found.pop("raises") == "RuntimeError: built for another CUDA"
    assert found == {"good": "", "talks": ""}


def test_what_is_declared_is_compared_with_what_is_installed(site):
    site("good", "1.5")
    site("old", "0.9")
    site("broken", "2.0", "import nothing_of_this_name")
    site("plugin", "1.0", requires=["good<2; extra == 'fast'"], extras=["fast"])
    site(
        "subject", "1.0",
        requires=["good>=1,<2", "old>=1", "broken", "lacking>=3", "never; sys_platform == 'os2'",
                  "plugin[fast]; extra == 'plus'", "lacking; extra == 'more'"],
        extras=["plus", "more"],
    )  # fmt: skip
    found = {row.name: row for row in packages.check("subject")}
    assert found["old"].level == found["broken"].level == found["lacking"].level == "problem"
    assert found["old"].result == "0.9 is installed, wanted old>=1"
    assert "nothing_of_this_name" in found["broken"].result
    assert found["lacking"].remedy == "pip install 'lacking>=3'"
    assert found["dependencies"].level == "warning"
    assert found["dependencies"].result.startswith("1 of 4 installed")
    assert found["dependencies"].result.endswith("good 1.5"), "and the others are told above"
    assert found["extras"].result == (
        "plus; not installed: more; to install one: pip install -e '.[NAME]'"
    )


def test_a_package_that_an_extra_adds_to_another_counts(site):
    site("old", "0.9")
    site("plugin", "1.0", requires=["old>=1; extra == 'fast'"], extras=["fast"])
    site("subject", "1.0", requires=["plugin[fast]"])
    found = {row.name: row for row in packages.check("subject")}
    assert found["plugin"].result == "old: 0.9 is installed, wanted old>=1"


def test_an_extra_that_the_run_needs_is_a_problem_where_it_does_not_work(site):
    site("broken", "2.0", "raise ImportError('no such library')")
    site("subject", "1.0", requires=["broken; extra == 'engine'", "lacking; extra == 'more'"],
         extras=["engine", "more"])  # fmt: skip
    assert {row.name for row in packages.check("subject")} == {"dependencies", "extras"}
    found = {row.name: row for row in packages.check("subject", needed=["broken"])}
    assert found["broken"].level == "problem"
    assert "no such library" in found["broken"].result


def test_what_is_not_installed_says_so():
    (row,) = packages.check("nothing-of-this-name")
    assert row.level == "warning"


@pytest.mark.parametrize(
    ("distribution", "module"),
    [("orbax-checkpoint", "orbax"), ("protobuf", "google"), ("grpcio", "grpc"), ("absl-py", "absl"),
     ("math-verify", "math_verify"), ("numpy", "numpy")],
)  # fmt: skip
def test_the_module_of_a_distribution_is_found(distribution, module):
    assert packages.modules_by_name()[distribution] == module


def test_rlx_declares_what_it_uses():
    assert {"jax", "rich", "grpcio"} <= {found.name for found in packages.required_packages("rlx")}
    assert {found.name for found in packages.required_packages("rlx", "torch")} == {"torch", "peft"}
