"""What a user's name means: an entry of a table, or an object of a module or a file."""

import json
import sys

import pytest

from rlx.base import UserError
from rlx.cli import user_code

TABLE = {"clip": 1, "sapo": 2}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score():\n    return 7\n\ndef fails():\n    1 / 0\n")
    (tmp_path / "broken.py").write_text("import json\nx = json.loads('{')\n")
    (tmp_path / "unwritten.py").write_text("def f(:\n")
    yield tmp_path
    for name in [n for n in sys.modules if n.startswith("file_") and "mine" in n]:
        del sys.modules[name]


def test_a_name_is_of_the_table_of_a_module_or_of_a_file(mine):
    assert user_code.find("key", "sapo", TABLE) == 2
    assert user_code.find("key", "json:loads", TABLE) is json.loads
    assert user_code.find("key", "mine.py:score", TABLE)() == 7
    assert user_code.find("key", str(mine / "mine.py:score"))() == 7


def test_an_edited_file_is_loaded_anew_once_that_is_asked_for(mine):
    before = user_code.find("key", "mine.py:score")
    (mine / "mine.py").write_text("def score():\n    return 'edited'\n")
    assert user_code.find("key", "mine.py:score") is before, "a run has one module from its start"
    user_code.forget_edited()
    after = user_code.find("key", "mine.py:score")
    assert after() == "edited"
    user_code.forget_edited()
    assert user_code.find("key", "mine.py:score") is after, "nothing has changed"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("clap", "unknown algorithm.loss 'clap'; did you mean 'clip'?"),
        ("mine.py", "'mine.py' names nothing; write path/to/file.py:name or module:name"),
        ("mine.py:", "names nothing"),
        ("mine.py:scor", "mine.py has no 'scor'; did you mean 'score'?"),
        ("mime.py:score", "there is no file mime.py; did you mean mine.py?"),
        ("jsom:loads", "there is no module 'jsom', did you mean 'json'?"),
        ("json:lauds", "did you mean 'loads'?"),
        ("broken.py:x", "broken.py, line 2"),
        ("unwritten.py:f", "unwritten.py, line 1"),
    ],
)
def test_a_mistake_is_one_line_with_the_key_and_a_remedy(mine, name, words):
    with pytest.raises(UserError) as caught:
        user_code.find("algorithm.loss", name, TABLE)
    text = str(caught.value)
    assert words in text
    assert "algorithm.loss" in text
    assert "\n" not in text


def test_a_failure_names_the_users_line_and_not_a_librarys(mine):
    fails = user_code.find("key", "mine.py:fails")
    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    assert user_code.where(caught.value).endswith("mine.py, line 5)")


def test_a_directory_whose_name_begins_as_the_librarys_is_the_users(tmp_path):
    place = f"{user_code.__file__.removesuffix('/cli/user_code.py')}_mine/loss.py"
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("\n1 / 0", place, "exec"))
    assert user_code.line(caught.value) == f"({place}, line 2)"
