"""Findings in the terminal, and as lines."""

import io

from rich.console import Console

from rlx.cli.findings import Finding, attempt, show, status, summary

ROWS = [
    Finding("machine", "devices", "ok", "1 × [bold]cpu[/bold]"),
    Finding("machine", "cores", "warning", "1 of 4", "give it two"),
    Finding("data", "rows", "problem", "rows.jsonl:2: not JSON " + "x" * 90, "one object a line"),
]


def test_lines_are_greppable_and_whole():
    out = Console(file=io.StringIO(), width=40)
    assert show(iter(ROWS), out) == ROWS
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "ok      machine: devices: 1 × [bold]cpu[/bold]"
    assert lines[1] == "warning machine: cores: 1 of 4 → give it two"
    assert lines[2].endswith("x" * 90 + " → one object a line")
    assert lines[3:] == ["1 problem, 1 warning, 1 ok"]


def test_the_table_fits_a_narrow_terminal_and_shows_sections():
    out = Console(file=io.StringIO(), width=60, force_terminal=True, color_system=None, _environ={})
    show(iter(ROWS), out)
    text = out.file.getvalue()
    assert all(len(line) <= 60 for line in text.splitlines())
    assert text.count("╭") == 2
    for word in ("machine", "data", "[bold]cpu[/bold]", "→ give it two", "→ one object a line"):
        assert word in text


def test_a_user_error_becomes_a_row_with_its_remedy():
    def fails():
        from rlx.base import UserError

        raise UserError("a is wrong: x; y is too; mend it")

    row, value = attempt("data", "rows", fails, str)
    assert (row.level, row.result, row.remedy) == ("problem", "a is wrong: x; y is too", "mend it")
    assert value is None
    row, value = attempt("data", "rows", lambda: 3, "{} rows".format)
    assert (row.level, row.result, value) == ("ok", "3 rows", 3)


def test_only_a_problem_is_a_failure():
    assert status(ROWS) == 1
    assert status(ROWS[:2]) == 0
    assert summary(ROWS[:1]) == "no problem, no warning, 1 ok"
