"""The trace is what Perfetto expects: one clock, named tracks, no two boxes on each other."""

import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.observe.timeline import Span, Timeline, assign_lanes, process_order, read


def saved(timeline, path):
    timeline.save(path)
    return json.loads(path.read_text())


def test_events_have_names_microseconds_and_their_process(tmp_path):
    now = iter([5_000, 9_500])
    timeline = Timeline(clock=lambda: next(now))
    with timeline.span("trainer", "train", step=3):
        pass
    timeline.add("publish", "main", "publish", 20_000, 19_000)
    timeline.add("server 0", "engine", "decode", 1_000, 2_000)
    trace = saved(timeline, tmp_path / "timeline.json")
    assert trace["otherData"] == {"clock": "CLOCK_MONOTONIC", "discarded_events": 0}
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [processes[pid] for pid in sorted(processes)] == ["trainer", "server 0", "publish"]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    real = {
        (
            e["ph"],
            processes[e["pid"]],
            threads[e["pid"], e["tid"]],
            e["name"],
            e["ts"],
            e.get("dur"),
        )
        for e in events
        if e["ph"] != "M"
    }
    assert real == {
        ("X", "trainer", "main", "train", 5.0, 4.5),
        ("X", "publish", "main", "publish", 20.0, 0.0),
        ("X", "server 0", "engine", "decode", 1.0, 1.0),
    }
    assert next(e for e in events if e["name"] == "train")["args"] == {"step": 3}


def test_a_span_is_recorded_when_its_block_raises(tmp_path):
    timeline = Timeline()
    try:
        with timeline.span("trainer", "train"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    events = saved(timeline, tmp_path / "t.json")["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["train"]


def test_memory_is_bounded_and_the_loss_is_told(tmp_path):
    timeline = Timeline(capacity=10)
    for i in range(25):
        timeline.add("trainer", "main", "step", i * 10, i * 10 + 5, step=i)
    trace = saved(timeline, tmp_path / "t.json")
    assert trace["otherData"]["discarded_events"] == 15
    steps = [e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert steps == list(range(15, 25))
    assert "15 earlier events were discarded" in {e["name"] for e in trace["traceEvents"]}


def test_an_empty_timeline_is_a_valid_trace(tmp_path):
    assert saved(Timeline(), tmp_path / "t.json")["traceEvents"] == []


def test_phases_nest_but_requests_lie_side_by_side():
    spans = [
        Span("p", "t", "step", 0, 100, {}),
        Span("p", "t", "wait", 0, 30, {}),
        Span("p", "t", "train", 30, 100, {}),
        Span("p", "t", "step", 100, 150, {}),
    ]
    assert [span.lane for span in assign_lanes(spans)] == [0, 0, 0, 0]
    requests = [Span("p", "t", "generate", *ends, {}) for ends in ((0, 90), (10, 20), (15, 40))]
    assert [span.lane for span in assign_lanes(requests)] == [0, 1, 2]
    late = [Span("p", "t", "generate", *ends, {}) for ends in ((0, 20), (10, 30), (20, 40))]
    assert [span.lane for span in assign_lanes(late)] == [0, 1, 0], "a free lane is used again"


spans_strategy = st.lists(
    st.builds(
        lambda name, start, length: Span("p", "t", name, start, start + length, {}),
        st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 15),
    ),
    max_size=30,
)  # fmt: skip


@given(spans_strategy)
def test_on_a_lane_spans_only_follow_or_contain_each_other(spans):
    placed = assign_lanes(spans)
    assert sorted(span[:5] for span in spans) == sorted(span[:5] for span in placed)
    for i, a in enumerate(placed):
        for b in placed[i + 1 :]:
            if a.lane != b.lane:
                continue
            follows = b.start_ns >= a.end_ns or a.start_ns >= b.end_ns
            inside = a.start_ns <= b.start_ns and b.end_ns <= a.end_ns and a.name != b.name
            assert follows or inside, (a, b)


def test_many_threads_lose_nothing(tmp_path):
    timeline = Timeline()

    def work(index):
        for i in range(200):
            timeline.add("rewards", f"worker {index}", "reward", i, i + 1)
            if i % 50 == 0:
                timeline.save(tmp_path / "t.json")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = saved(timeline, tmp_path / "t.json")["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 800
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_processes_have_a_natural_order():
    names = [
        "evaluation", "server 10", "teacher 0", "other", "server 2", "trainer", "rewards", "publish"
    ]  # fmt: skip
    assert sorted(names, key=process_order) == [
        "trainer", "server 2", "server 10", "teacher 0", "rewards", "publish", "evaluation", "other"
    ]  # fmt: skip


def test_a_second_start_goes_on_with_the_timeline_of_the_first(tmp_path):
    """Also on a machine whose clock began anew: the file's age says how long ago the first was."""
    path = tmp_path / "timeline.json"
    first = Timeline(clock=lambda: 10**15, capacity=3)
    for start in (0, 1_000, 2_000, 2_500):
        first.add("server 0", "engine", "decode", start * 10**6, (start + 1_000) * 10**6, version=1)
    first.save(path)
    os.utime(path, ns=(time.time_ns() - 60 * 10**9,) * 2)
    now = 100 * 10**9
    second = Timeline(clock=lambda: now, earlier=path)
    second.add("trainer", "main", "train", now, now + 10**9)
    spans = {(s.name, s.track): [] for s in read(saved(second, path))}
    for span in read(saved(second, path)):
        spans[span.name, span.track].append((span.start_ns / 1e9, span.end_ns / 1e9, span.args))
    decodes = spans["decode", "engine"]
    assert [args for _, _, args in decodes] == [{"version": 1}] * 3
    assert decodes[-1][1] == pytest.approx(40, abs=10)
    assert decodes[-1][1] - decodes[0][0] == pytest.approx(2.5)
    assert spans["train", "main"] == [(100.0, 101.0, {})]
    assert json.loads(path.read_text())["otherData"]["discarded_events"] == 1
    path.write_text('{"traceEvents": [1, {"ph": "X"}, {"ph": "X", "pid": 1, "ts": "a", "dur": 1}]}')
    assert [s.name for s in read(saved(Timeline(earlier=path), path))] == []
