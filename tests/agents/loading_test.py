"""Classes named on a command line: found, told apart, made, or explained in one line."""

import pytest

from rlx.agents import loading
from rlx.base import UserError
from rlx.rollout.workflows import RLVR


@pytest.fixture(scope="module")
def classes(agents):
    """The path of the file with the tests' agents."""
    return agents.classes


def refused(call, *arguments):
    with pytest.raises(UserError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_class_is_found_by_module_or_file(classes):
    assert loading.load_class("rlx.rollout.workflows:RLVR") is RLVR
    found = loading.load_class(f"{classes}:Repeat")
    assert loading.load_class(f"{classes}:Repeat") is found
    assert loading.kind(found) == "agent"
    assert loading.kind(RLVR) == "workflow"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Repeat", "names nothing; write path/to/file.py:name"),
        (
            "rlx.rollout.workflows.RLVR",
            "workflow='rlx.rollout.workflows.RLVR' names nothing; write",
        ),
        ("rlx.rollout.workflow:RLVR", "did you mean 'rlx.rollout.workflows'"),
        ("nosuchmodule.x:Y", "there is no module 'nosuchmodule'"),
        ("rlx.rollout.workflows:RLRV", "did you mean 'RLVR'"),
        ("rlx.rollout.workflows:render", "is a function, not a class"),
        ("{file}:Repaet", "did you mean 'Repeat'"),
        ("{file}:NUMBER", "is a int, not a class"),
        ("{file}s.py:Repeat", "there is no file"),
    ],
)
def test_a_name_that_is_none_is_explained(classes, name, said):
    assert said in refused(loading.load_class, name.format(file=classes))


def test_a_file_that_is_nearly_named_is_suggested(tmp_path):
    (tmp_path / "solver.py").write_text("")
    said = refused(loading.load_class, f"{tmp_path}/slover.py:Agent")
    assert f"did you mean {tmp_path}/solver.py" in said
    assert "has no 'Agent'" in refused(loading.load_class, f"{tmp_path}/solver.py:Agent")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nosuchthing", "ModuleNotFoundError: No module named 'nosuchthing'"),
        ("x = 1\n\nraise ValueError('two\\nlines')", "ValueError: two lines"),
        ("def f(:\n  pass", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(tmp_path, source, said):
    path = tmp_path / "bad.py"
    path.write_text(source)
    line = source.count("\n", 0, source.find("raise")) + 1 if "raise" in source else 1
    text = refused(loading.load_class, f"{path}:Agent")
    assert said in text
    assert f"{path}, line {line}" in text


def test_files_beside_the_file_can_be_imported(tmp_path):
    (tmp_path / "beside_it_and_unique.py").write_text("class Base:\n  value = 5\n")
    (tmp_path / "own.py").write_text(
        "from beside_it_and_unique import Base\n"
        "class Agent(Base):\n  async def run(self, data, **kw): pass\n"
    )
    assert loading.load_class(f"{tmp_path}/own.py:Agent").value == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NotAsync", "run is not async"),
        ("NoNames", "NoNames.run(self, data) has the wrong parameters"),
        ("NoRun", "rename 'rum' to `run`"),
    ],
)
def test_a_class_that_is_neither_is_explained(classes, name, said):
    text = refused(loading.kind, loading.load_class(f"{classes}:{name}"))
    assert said in text
    assert "async def run(self, data, **extra_kwargs)" in text
    assert "async def run(self, fleet, task)" in text


def test_a_class_whose_constructor_leaves_is_an_error():
    class Leaves:
        def __init__(self):
            raise SystemExit(0)

    assert "SystemExit: 0 (" in refused(loading.instance, Leaves)


def test_a_class_is_made_with_the_arguments_that_it_takes(classes):
    repeat = loading.load_class(f"{classes}:Repeat")
    assert loading.instance(repeat).turns == 1
    assert loading.instance(repeat, {"turns": 3, "top_p": 0.5}).options == {"top_p": 0.5}
    assert "takes no arguments" in refused(
        loading.instance, loading.load_class(f"{classes}:Counter"), {"x": 1}
    )
    refuses = loading.load_class(f"{classes}:Refuses")
    assert "lacks tool" in refused(loading.instance, refuses)
    assert "did you mean 'tool'" in refused(loading.instance, refuses, {"tol": 1})
    assert "ValueError: no tool 1 (" in refused(loading.instance, refuses, {"tool": 1})


def test_arguments_come_as_a_json_object():
    assert loading.parse_kwargs("") == loading.parse_kwargs(None) == {}
    assert loading.parse_kwargs({"a": 1}) == {"a": 1}
    assert loading.parse_kwargs('{"a": [1]}') == {"a": [1]}
    assert "is not a JSON object" in refused(loading.parse_kwargs, "[1]")
    assert "is not a JSON object (Expecting property" in refused(loading.parse_kwargs, "{a: 1}")
