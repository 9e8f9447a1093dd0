"""Curves of several runs over one another: seeds are one band, settings have a line and a row."""

import json
import os
import re
import subprocess
import sys

import pytest

from rlx.base import UserError
from rlx.observe.report_overlay import write_overlay
from rlx.observe.run_table import find, summary
from tests.observe.run_report_test import charts_of, lines_of, text_of


@pytest.fixture
def runs(make_run, tmp_path):
    """Two learning rates with two seeds each, of which one is half done; and one other run."""
    for index, (rate, seed) in enumerate([(1e-5, 0), (1e-5, 1), (1e-4, 0), (1e-4, 1), (1e-3, 0)]):
        run = make_run(tmp_path / "runs" / f"{rate}-{seed}", steps=20, seed=index)
        config = json.loads((run / "config.json").read_text())
        config["seed"], config["optimizer"]["learning_rate"] = seed, rate
        (run / "config.json").write_text(json.dumps(config))
    half = tmp_path / "runs/0.0001-1/metrics.jsonl"
    half.write_text("".join(json.dumps(r) + "\n" for r in lines_of(half)[:10]))
    return tmp_path / "runs"


def overlay(runs, out):
    return write_overlay(out, [summary(path, {}) for path in find([runs])]).read_text()


def test_seeds_are_a_band_about_their_mean_and_a_single_run_is_a_line(runs, tmp_path):
    charts = charts_of(overlay(runs, tmp_path / "all.html"))
    lines = {line["name"]: line for line in charts["Held-out accuracy"]["lines"]}
    names = [f"optimizer.learning_rate={rate}" for rate in ("1e-05", "0.0001", "0.001")]
    assert set(lines) == set(names)
    scores = [
        [e["greedy_acc"] for e in lines_of(runs / f"1e-05-{seed}/eval.jsonl")] for seed in (0, 1)
    ]
    both = [*zip(*scores, strict=True)]
    band = lines[names[0]]
    assert band["steps"] == [0, 10, 20]
    assert band["values"] == pytest.approx([sum(pair) / 2 for pair in both], rel=1e-5)
    assert band["band"][0] == pytest.approx([min(pair) for pair in both], rel=1e-5)
    assert band["band"][1] == pytest.approx([max(pair) for pair in both], rel=1e-5)
    assert lines[names[2]]["band"] == []
    reward = {line["name"]: line for line in charts["Task reward"]["lines"]}
    assert reward[names[1]]["steps"] == list(range(1, 21)), "the longer seed goes on by itself"
    low, high = reward[names[1]]["band"]
    assert low[10:] == high[10:] == reward[names[1]]["values"][10:]
    assert low[5] < high[5]
    alone = reward[names[2]]
    own = [r["task_reward"] for r in lines_of(runs / "0.001-0/metrics.jsonl")]
    assert (alone["band"], alone["values"]) == ([], pytest.approx(own, rel=1e-5))
    assert alone["means"], "its running mean is drawn over it"
    assert len({line["color"] for line in lines.values()}) == 3
    assert {"Entropy", "Off-policy drift: behaviour", "Time of a step"} <= set(charts)


def test_the_table_has_the_keys_that_differ_and_how_far_each_run_is(runs, tmp_path):
    (runs / "failed").mkdir()
    (runs / "failed/console.log").touch()
    html = overlay(runs, tmp_path / "all.html")
    (table,) = re.findall(r"<table>(.*?)</table>", html, re.DOTALL)
    heads = re.findall(r"<th>(.*?)</th>", table)
    assert heads[:4] == ["run", "optimizer.learning_rate", "seed", "state"]
    text = text_of(html)
    assert "0 of 6 finished" in text
    assert "3 settings" in text
    assert "1 without a step" in text
    assert "10 of 20" in text


def test_names_of_runs_stay_text_and_runs_without_a_step_are_refused(make_run, tmp_path):
    nasty = make_run(tmp_path / "runs/<img src=x>", steps=2)
    make_run(tmp_path / "runs/b", steps=2)
    assert "<img" not in overlay(tmp_path / "runs", tmp_path / "all.html")
    for run in (nasty, tmp_path / "runs/b"):
        (run / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="none of 2 runs has a finished step; train first"):
        overlay(tmp_path / "runs", tmp_path / "all.html")


def test_the_command_writes_one_page_for_a_directory_of_runs(runs, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "rlx.report", str(runs)]
    shown = subprocess.check_output(argv, text=True, cwd=tmp_path, env=environment)
    assert shown == "comparison.html\n"
    assert "Task reward" in (tmp_path / "comparison.html").read_text()
    assert not list(runs.rglob("report.html"))
