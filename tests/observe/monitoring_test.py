"""The shipped alert rules fire when they should and only then; rules and dashboard name metrics.

promtool, of Debian's package prometheus, evaluates the rules; without it those tests are skipped.
"""

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import yaml

from rlx.engines import server_metrics

PLACE = resources.files("rlx.observe") / "monitoring"
RULES = yaml.safe_load((PLACE / "rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((PLACE / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
]
METRICS = {name for text in EXPRESSIONS for name in re.findall(r"\brlx_\w+", text)}
PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def trainer(**values):
    """Series of a trainer: name → values each minute, as promtool writes them."""
    return {f'rlx_{name}{{role="trainer", run="a"}}': each for name, each in values.items()}


def up(role, values):
    return {f'up{{job="rlx", role="{role}", run="a"}}': values}


# alert → series, the minute to look at, and whether it fires, of each case
CASES = {
    "RlxEngineDead": [
        ({'rlx_engine_alive{role="server"}': "1x3 0x10"}, 10, True),
        ({'rlx_engine_alive{role="server"}': "1x3 0x10"}, 3, False),
        (up("server", "1x3 0x10"), 10, True),
        (up("server", "1x20"), 10, False),
        (trainer(servers="2x20", servers_live="1x20"), 10, True),
        (trainer(servers="2x20", servers_live="2x20"), 10, False),
    ],
    "RlxStalenessAtBound": [
        (trainer(staleness_mean="2x20", max_staleness="2x20"), 15, True),
        (trainer(staleness_mean="2x20", max_staleness="2x20"), 5, False),
        (trainer(staleness_mean="1.2x20", max_staleness="2x20"), 15, False),
        (trainer(staleness_mean="0x20", max_staleness="0x20"), 15, False),  # synchronous
    ],
    "RlxNoStep": [
        (trainer(seconds_since_step="0+60x40", step_seconds="10x40"), 30, True),
        (trainer(seconds_since_step="0+60x40", step_seconds="10x40"), 10, False),
        (trainer(seconds_since_step="0+60x40", step_seconds="600x40"), 30, False),  # 3 steps' time
        (trainer(seconds_since_step="0+60x40"), 30, True),  # no first step
        (up("trainer", "1x3 0x10"), 10, True),
        (up("trainer", "1x20"), 10, False),
    ],
    "RlxFailures": [
        (trainer(failed="0+1x60", accepted="0+2x60"), 30, True),
        (trainer(failed="0+1x60", accepted="0+90x60"), 30, False),
        (trainer(failed="3x60", accepted="0+90x25 900+90x30"), 30, False),  # resumed: steps again
    ],
    "RlxDiskNearlyFull": [
        (trainer(disk_free_bytes="5e9x9", checkpoint_bytes="2e9x9"), 5, True),
        (trainer(disk_free_bytes="5e9x9", checkpoint_bytes="1e9x9"), 5, False),
        (trainer(disk_free_bytes="5e8x9", checkpoint_bytes="1e6x9"), 5, True),
    ],
    "RlxGate": [
        (trainer(gate_ok="0x9"), 5, True),
        (trainer(gate_ok="1x9"), 5, False),
        (trainer(gate_mean_delta="0.05x9", gate_limits_mean="0.06x9"), 5, True),
        (trainer(gate_mean_delta="0.02x9", gate_limits_mean="0.06x9"), 5, False),
    ],
}


@pytest.fixture
def promtool():
    """A function that runs promtool and returns its exit status and output."""
    program = shutil.which("promtool")
    if not program:
        pytest.skip("needs promtool: apt-get install prometheus")

    def run(*arguments: object) -> tuple[int, str]:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def cases(wanted) -> str:
    """A file for `promtool test rules`: `wanted(fires)` is whether a case's alert should fire."""
    tests = []
    for alert, table in CASES.items():
        for series, minute, fires in table:
            firing = f'count by (alertname) (ALERTS{{alertstate="firing", alertname="{alert}"}})'
            found = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
            looked = {"expr": firing, "eval_time": f"{minute}m"}
            tests.append({
                "name": f"{alert} {series} {minute}",
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [looked | {"exp_samples": found if wanted(fires) else []}],
            })  # fmt: skip
    files = [str(PLACE / "rules.yml")]
    return json.dumps({"rule_files": files, "evaluation_interval": "1m", "tests": tests})


def test_there_are_six_rules_and_each_has_cases_in_which_it_fires_and_does_not():
    assert [rule["alert"] for rule in RULES] == list(CASES)
    assert len(CASES) == 6
    assert all({fires for *_, fires in table} == {True, False} for table in CASES.values())


def test_every_rule_fires_and_does_not_fire_where_it_should(promtool, tmp_path):
    status, said = promtool("check", "rules", PLACE / "rules.yml")
    assert (status, "6 rules found" in said) == (0, True), said
    (tmp_path / "cases.yml").write_text(cases(lambda fires: fires))
    status, said = promtool("test", "rules", tmp_path / "cases.yml")
    assert status == 0, said
    (tmp_path / "wrong.yml").write_text(cases(lambda fires: not fires))
    status, said = promtool("test", "rules", tmp_path / "wrong.yml")
    assert status != 0
    assert said.count("exp:") == sum(map(len, CASES.values())), "a case that cannot fail"


def test_rules_and_dashboard_name_only_metrics_of_the_page_and_of_servers():
    """A run's own scrape has them too, see tests/run/trainer_metrics_test.py."""
    rows = re.findall(r"^\|([^|]+)\|", PAGE, re.MULTILINE)
    keys = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    servers = set(re.findall(r"\brlx_\w+", server_metrics.__doc__))
    for metric in METRICS - {f"{name}{end}" for name in servers for end in ("", "_bucket")}:
        name = re.sub("^rlx_(eval_|gate_)?", "", metric)
        own, _, part = name.partition("_")
        of_dict = own in ("seconds", "limits") and part in ("wait", "train", "publish", "mean")
        assert name in keys or of_dict, f"{metric} is not in docs/metrics.md"


def test_the_dashboard_has_a_row_for_each_question_and_each_panel_asks_of_the_chosen_runs():
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Learning", "Speed", "Staleness", "Fleet", "Faults"]
    assert DASHBOARD["schemaVersion"] >= 38  # of Grafana 10
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "run"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel["targets"]:
            assert 'run=~"$run"' in target["expr"], target["expr"]


def test_every_expression_is_one_of_promql(promtool, tmp_path):
    texts = [text.replace("$run", ".*") for text in EXPRESSIONS]
    rules = [{"record": f"a:{i}", "expr": text} for i, text in enumerate(texts)]
    (tmp_path / "all.yml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    status, said = promtool("check", "rules", tmp_path / "all.yml")
    assert status == 0, said
