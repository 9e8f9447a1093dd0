"""The page: whole from whole runs, useful from partial ones, harmless whatever a model writes."""

import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from importlib import resources

import pytest

from rlx.base import UserError
from rlx.cli.text import visible
from rlx.observe.metrics import MetricsWriter
from rlx.observe.report_learning import optimisation, tiles
from rlx.observe.report_samples import card, choose, pieces
from rlx.observe.report_speed import busy_shares, color_of, covered_ns, overview
from rlx.observe.run_report import _header, page, write_report
from rlx.observe.rundir import load
from rlx.observe.timeline import Span, Timeline
from rlx.system.jsonl import append_jsonl

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements close in order; keeps tags, attributes and scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if not self.stack or self.stack[-1] not in ("script", "style"):
            self.text.append(data)


def text_of(page):
    return " ".join(" ".join(Page(page).text).split())


def report(run):
    """Write the report; return its HTML and its visible text."""
    html = write_report(run).read_text()
    return html, text_of(html)


def charts_of(html):
    data = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert html.count('<div class="plot">') == len(data)
    return {chart["title"]: chart for chart in map(json.loads, data)}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def change(run, name, **more):
    """Give each record of a file more keys."""
    (run / name).write_text("".join(json.dumps(r | more) + "\n" for r in lines_of(run / name)))


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(tmp_path / "arithmetic-0", steps=40)


def test_several_rewards_and_a_workflow_s_numbers_have_charts_and_one_reward_has_none(run):
    change(run, "metrics.jsonl", **{"reward/arithmetic": 1.0})
    assert "before its weight" not in text_of(page(load(run)))
    config = json.loads((run / "config.json").read_text())
    config["reward"]["terms"] = [["arithmetic", 1.0], ["mine.py:brevity", 0.5]]
    (run / "config.json").write_text(json.dumps(config))
    change(run, "metrics.jsonl", **{"reward/brevity": 0.5, "info/turns": 2.0})
    text = text_of(page(load(run)))
    for part in ("before its weight", "The workflow's own",
                 "reward 1·arithmetic + 0.5·mine.py:brevity"):  # fmt: skip
        assert part in text, part


def test_a_mixtures_router_has_charts_of_all_experts_or_of_the_least_and_most_used(run):
    def charts(experts):
        if experts:
            used = {str(i): (i + 1) * 2 / experts / (experts + 1) for i in range(experts)}
            change(run, "metrics.jsonl", expert_load=used, expert_max_share=0.4,
                   expert_balance=1.2, router_entropy=1.5)  # fmt: skip
        return {c["title"]: c for c in optimisation(load(run))}

    assert not [title for title in charts(0) if "xpert" in title or "outer" in title]
    few, many = charts(4), charts(128)
    assert {"Balance of experts", "Busiest expert", "Router entropy"} <= set(few)
    assert few["Balance of experts"]["low"] == 1
    names = [[line["name"] for line in c["Load of experts"]["lines"]] for c in (few, many)]
    assert names == [["0", "1", "2", "3"], ["0", "1", "2", "3", "124", "125", "126", "127"]]
    assert few["Load of experts"]["lines"][3]["values"][-1] == pytest.approx(0.4)
    assert "0.00781 is even" in many["Load of experts"]["about"]


def test_a_finished_run_shows_all_it_has(run):
    assert write_report(run) == run / "report.html"
    html, text = report(run)
    for part in ("arithmetic-0", "finished", "Held-out accuracy", "Task reward", "Trainer waiting",
                 "Dropped", "limit 2", "Entropy", "Gradient norm", "Importance weights",
                 "Clipped tokens", "Trajectory length", "Cut completions", "lag 2",
                 "Time of a step", "Tokens a second", "Publishing", "server 1", "idle",
                 "What ran when", "evaluation", "\\boxed{83}", "First steps", "With prompts",
                 "optimizer.learning_rate", "keys differ", "Environment",
                 "packages.numpy"):  # fmt: skip
        assert part in text, part
    # The question is shown with the answer.
    attributes = Page(html).attributes
    assert ("data-prompts", "on") in attributes
    assert html.count('<details class="prompt" open>') == html.count('<details class="prompt"') > 0
    # The page makes no request and runs one known script.
    loads = [pair for pair in attributes if pair[0] in ("src", "href", "srcset", "data", "action")]
    assert all(key == "href" and value.startswith("#") for key, value in loads)
    assert "url(" not in html
    assert "@import" not in html
    policy = next(v for k, v in attributes if k == "content" and v and "default-src" in v)
    assert policy.startswith("default-src 'none'")
    assert "script-src 'sha256-" in policy
    assert not [k for k, _ in attributes if k.startswith("on")]


def test_what_a_model_writes_stays_text(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=5, attack=True)
    nasty = "</script><script>alert('name')</script>\u2028"
    config = json.loads((run / "config.json").read_text())
    config["model"]["path"] = config["seed"] = config["algorithm"]["preset"] = nasty
    (run / "config.json").write_text(json.dumps(config))
    row = {"step": 5, "completion": nasty, "reward": 1.0, "prompt": nasty, "stop_reason": nasty,
           "trajectory_id": nasty, "versions": [4, nasty, 3.0], "answer": nasty,
           "token_texts": [nasty] * 2}  # fmt: skip
    (run / "rollouts" / "step-000006.jsonl").write_text(json.dumps(row) + "\n")
    record = {"step": 6, "seconds": {nasty: 1.0}, "staleness_histogram": {nasty: 1}}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")
    trace = {"traceEvents": [{"ph": "X", "name": nasty, "pid": nasty, "tid": 1, "ts": 1, "dur": 2,
                              "args": {nasty: nasty}}]}  # fmt: skip
    (run / "timeline.json").write_text(json.dumps(trace))
    html, text = report(run)
    assert "img" not in Page(html).tags
    scripts = re.findall(r"<script\b[^>]*>", html)
    assert set(scripts) == {'<script type="application/json">', "<script>"}
    assert scripts.count("<script>") == 1
    assert "<script>document.title='stolen'</script>" in text
    assert "⟨BEL⟩⟨U+202E⟩" in text
    assert not {"\x07", "\u202e"} & set(html)
    # Names of phases come from users' code; they stand in a chart's data and in its legend.
    chart = charts_of(html)["Time of a step"]
    assert visible(nasty) in {line["name"] for line in chart["lines"]}


def test_characters_that_hide_or_reorder_text_are_named():
    assert visible("a\x1b[31m\u202eb\r\nc\td\x7f\ud800") == (
        "a⟨ESC⟩[31m⟨U+202E⟩b\nc\td⟨0x7f⟩⟨U+D800⟩"
    )


def test_partial_runs_make_partial_pages(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=6, total_steps=100)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "task_rew')
    (run / "timeline.json").write_text('{"traceEvents": [')
    _, text = report(run)
    assert "6 of 100 steps" in text
    assert "What ran when" not in text
    for name in ("eval.jsonl", "timeline.json", "environment.json", "config.json"):
        (run / name).unlink()
    for file in (run / "rollouts").iterdir():
        file.unlink()
    _, text = report(run)
    assert "Task reward" in text
    assert "Samples" not in text
    assert "Held-out accuracy" not in text


def test_the_last_evaluation_is_shown_even_if_it_is_unknown(run):
    append_jsonl(run / "eval.jsonl", {"step": 99, "greedy_acc": None})
    title, value, _ = next(tile[1:] for tile in tiles(load(run)))
    assert (title, value) == ("Held-out accuracy", "–")


def test_a_failed_row_of_each_set_of_questions_counts(run):
    record = {"which": "eval", "row": 3, "attempts": 1, "text": "t", "error": "E", "message": "m"}
    for more in ({}, {"set": "easy"}, {"set": "hard"}, {"set": "hard"}):
        append_jsonl(run / "skipped.jsonl", record | more)
    text = report(run)[1]
    assert "3 rows failed in every attempt" in text
    for name in ("eval row 3, 1", "eval easy row 3, 1", "eval hard row 3, 1"):
        assert name in text, name


def test_a_start_with_other_settings_does_not_claim_the_steps_before_it(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=6)
    config = json.loads((run / "config.json").read_text())
    first = (run / "environment.json").read_bytes()
    config["algorithm"]["preset"], config["total_steps"] = "dapo", 9
    changed = ["algorithm.preset grpo → dapo", "total_steps 6 → 9"]
    given = {"config": config, "changed": changed, "place": {"cores": 77}}
    writer = MetricsWriter(run, None, 7, **given)
    _, text = report(run)
    assert "6 of 9 steps" in text
    assert "GRPO" in text
    assert "DAPO" not in text, "it has made no step"
    writer.write("metrics.jsonl", {"step": 7, "start": writer.start})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:5] + lines[6:]))
    html, text = report(run)
    for part in ("GRPO → DAPO", "7 of 9 steps", "after step 6", changed[0], "77",
                 "no record of steps 3–4, 6"):  # fmt: skip
        assert part in text, part
    with open(run / "eval.jsonl", "a") as file:
        file.write('{"step": 9}\n')
    assert "no record of steps 3–4, 6, 8–9" in report(run)[1], "metrics.jsonl is damaged"
    (marks,) = [value for key, value in Page(html).attributes if key == "data-changes"]
    assert json.loads(marks) == [[6, None, "\n".join(changed)]]
    assert (run / "environment.json").read_bytes() == first
    starts = [(s["start"], s["step"], s["changed"]) for s in lines_of(run / "starts.jsonl")]
    assert starts == [(1, 0, []), (2, 6, changed)]


def test_a_config_or_a_minimal_record_is_enough_and_other_places_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a directory; give the WORKDIR"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no metrics.jsonl.*; give the WORKDIR"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.json").write_text('{"total_steps": 5, "seed": 0}')
    assert "No step is finished yet" in report(tmp_path)[1]
    (tmp_path / "config.json").unlink()
    records = '{"step": 1}\n{"step": "x"}\n[]\n{"step": 2, "task_reward": "?"}\n'
    (tmp_path / "metrics.jsonl").write_text(records)
    report(tmp_path)


def test_the_command_prints_the_path_or_one_error_line(run, tmp_path):
    def command(*arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-m", "rlx.report", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)

    done = command(run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n")
    for wrong in ([tmp_path / "nowhere"], [run, f"--out={tmp_path / 'out.html'}"]):
        done = command(*wrong)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1


def test_five_hundred_steps_stay_fast_and_small(make_run, tmp_path):
    run = make_run(tmp_path / "long", steps=500)
    start = time.process_time()
    text = page(load(run))
    assert time.process_time() - start < 10, "1 s on a quiet core, of this process alone"
    assert len(text) < 1_500_000


def test_the_vendored_library_is_the_version_it_names():
    vendored = resources.files("rlx.observe") / "uplot"
    named = re.search(r"uPlot ([\d.]+),", (vendored / "README.md").read_text()).group(1)
    assert f"(v{named})" in (vendored / "uPlot.iife.min.js").read_text().splitlines()[0]
    assert "MIT License" in (vendored / "LICENSE").read_text()


def test_the_charts_carry_the_runs_numbers(run):
    charts = charts_of(report(run)[0])
    records = load(run).metrics
    reward, held_out = charts["Reward and held-out accuracy"]["lines"]
    assert reward["values"] == pytest.approx([r["task_reward"] for r in records], rel=1e-5)
    assert reward["times"] == [r["elapsed_seconds"] for r in records]
    assert (held_out["steps"], held_out["dots"]) == ([0, 10, 20, 30, 40], True)
    stack = charts["Time of a step"]
    assert stack["stacked"]
    heights = [sum(step) for step in zip(*(line["values"] for line in stack["lines"]), strict=True)]
    assert heights == pytest.approx([r["step_seconds"] for r in records], rel=1e-4)


def test_the_chart_of_publishing_goes_by_the_versions_of_spans(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    trace = {"traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "publish"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "server 0"}},
        {"ph": "X", "name": "publish", "pid": 1, "tid": 1, "ts": 1000, "dur": 4000,
         "args": {"version": 2}},
        {"ph": "X", "name": "load", "pid": 2, "tid": 1, "ts": 2000, "dur": 2000,
         "args": {"version": 2}},
    ]}  # fmt: skip
    (run / "timeline.json").write_text(json.dumps(trace))
    publishing = charts_of(report(run)[0])["Publishing"]
    costs = {line["name"]: (line["steps"], line["values"]) for line in publishing["lines"]}
    assert costs["delivery"] == ([2], [4.0])
    assert costs["load"] == ([2], [2.0])
    assert [span.name for span in load(run).spans] == ["publish", "load"]


def test_a_sample_has_its_versions_and_what_it_observed_between_turns():
    sample = {"step": 5, "completion": "abcdef", "versions": [-1, 2, 2, 4], "reward": 1.0}
    shown = card(sample, 0.0, 1.0, lambda name: "")
    assert "3 tokens" in shown["facts"]
    assert "version 2–4" in shown["facts"]
    assert shown["pieces"] == [("abcdef", "")]
    talk = {**sample, "completion": "ab<NO>cdef", "turns": [[0, 2, 1], [6, 10, 2]]}
    observed = ("<NO>", "before turn 2, observed")
    assert pieces(talk) == [("ab", ""), observed, ("cdef", "")]


def test_best_and_worst_do_not_overlap():
    samples = [{"step": i, "completion": str(i), "reward": float(i % 2)} for i in range(8)]
    chosen = choose([*samples, {"step": 9, "completion": "unrated"}])
    assert [s["step"] for s in chosen["best"]] == [7, 5, 3, 1]
    assert [s["step"] for s in chosen["worst"]] == [6, 4, 2, 0]
    assert chosen["late"][0]["completion"] == "unrated"


def test_busy_time_counts_overlaps_once():
    def span(start, end, name="decode", process="server 0"):
        return Span(process, "engine", name, start, end, {})

    assert covered_ns([span(0, 10), span(2, 5), span(8, 12), span(20, 21)]) == 13
    ticks = [span(i * 1e6, i * 1e6 + 1e4, "tick") for i in range(4000)]
    ((process, hidden, rows),) = overview([span(0, 4e9), *ticks], 2.0)["views"]["last"]["rows"]
    assert (process, hidden) == ("server 0", 0)
    assert [len(boxes) < 2000 for boxes in rows] == [True, True], "the smallest are one box"
    assert rows[0][0] | {"tip": ""} == {
        "name": "decode", "color": "c3", "left": 0.0, "width": 100.0, "tip": ""
    }  # fmt: skip
    assert color_of("Waiting") == color_of("Waiting")
    assert color_of("wait") == "c-wait"


def test_the_time_between_two_starts_is_no_idle_time_of_a_server():
    def span(process, start, end):
        return Span(process, "main", "decode" if process == "server 0" else "wait", start, end, {})

    parts = ("trainer", 100), ("server 0", 50)
    spans = [span(name, at, at + length) for at in (0, 10_000) for name, length in parts]
    (shares,) = busy_shares(spans).values()
    assert {share.name: share.share for share in shares} == {"decode": 0.5, "idle": 0.5}


def test_a_run_on_a_dataset_shows_its_losses_and_margins_and_no_reward(tmp_path):
    config = {"algorithm": {"preset": "dpo"}, "fleet": {"num_servers": 0}, "total_steps": 3,
              "rollout": {"batch_prompts": 32, "max_staleness": 2}, "reward": {"name": "gsm8k"},
              "sampling": {"n_samples": 8}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sample = {"prompt": "q", "completion": "a", "reward": 1.0, "versions": [], "logprobs": []}
    writer = MetricsWriter(tmp_path)
    for step in range(1, 4):
        pairs = {"pair_loss": 0.7 - step / 10, "pair_accuracy": 0.6, "pair_margin": step / 5}
        record = {"step": step, "elapsed_seconds": step, "n_valid_tokens": 9, **pairs}
        writer.write("metrics.jsonl", record)
        writer.write_rollouts(step, [sample | {"step": step}])
    held_out = {"step": 3, "held_out_pair_loss": 0.5, "held_out_pair_accuracy": 0.9}
    writer.write("eval.jsonl", held_out)
    _, text = report(tmp_path)
    for part in ("DPO", "32 rows a batch", "no servers", "Held-out loss", "Held-out pairs right",
                 "held-out pairs", "Margin"):  # fmt: skip
        assert part in text, part
    for part in ("Task reward", "Held-out accuracy", "gsm8k · ", "max staleness",
                 "Asynchrony", "samples"):  # fmt: skip
        assert part not in text.replace("sampling.n_samples", ""), part


@pytest.mark.parametrize(
    ("fleet", "shown"),
    [
        ({}, "1 × jax server"),
        ({"addresses": ["@servers"]}, "3 servers"),
        ({"join": "place", "num_servers": 0}, "3 servers"),
        ({"num_servers": 0}, "no servers"),
    ],
)
def test_the_header_counts_servers_elsewhere_by_what_they_did(fleet, shown, tmp_path):
    config = {"fleet": {"num_servers": 1, "engine": "jax", **fleet}}
    timeline = Timeline()
    for server in range(3):
        timeline.add(f"server {server}", "engine", "decode", 0, 1_000_000)
    timeline.save(tmp_path / "timeline.json")
    MetricsWriter(tmp_path, config=config).write("metrics.jsonl", {"step": 1, "start": 1})
    assert shown in _header(load(tmp_path))["facts"]


def test_a_distillation_shows_its_distance_to_the_teacher_and_what_the_teacher_did(tmp_path):
    timeline = Timeline()
    timeline.add("teacher 0", "engine", "score", 0, 600_000_000)
    timeline.add("trainer", "main", "train", 0, 1_000_000_000)
    timeline.save(tmp_path / "timeline.json")
    writer = MetricsWriter(tmp_path)
    for step in range(1, 4):
        record = {"step": step, "elapsed_seconds": step, "reference_kl": 1 / step}
        writer.write("metrics.jsonl", record)
    _, text = report(tmp_path)
    for part in ("Distance to the anchor", "teacher 0", "score 60 %"):
        assert part in text, part


def test_planned_seconds_are_next_to_measured_ones(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=6)
    assert "Planned and measured" not in report(run)[1]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = sum(r["seconds"]["train"] for r in records[1:]) / 5  # the first step compiles
    plan = {"step": 1.0, "train": train + 2.5, "wait": 0.2, "generate": 0.5}
    (run / "plan.json").write_text(json.dumps({"allocation": "vllm:d7+jax:f1", "seconds": plan}))
    _, text = report(run)
    assert "they differ most in train, by 2.50 s; the plan was vllm:d7+jax:f1" in text
    assert f"train {train + 2.5:.2f} s planned, {train:.2f} s measured" in text
    assert "wait 0.20 s planned" in text
