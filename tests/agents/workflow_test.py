"""Agents in their own processes, over a real gateway, gRPC and the evaluator."""

import asyncio
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlx.agents import trajectories
from rlx.agents.agent_options import AgentOptions
from rlx.agents.workflow import AgentWorkflow, run_agent, worker_kind
from rlx.base import UserError
from rlx.evaluation.runner import Evaluator
from rlx.fleet.requests import Sampling
from rlx.journal import history, records
from rlx.rollout.attempts import Patience, RolloutError
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.rollout.unfinished import Unfinished
from rlx.rollout.workflows import Task
from rlx.system.process_supervisor import descendants
from rlx.workers.worker_pool import Evicted, WorkerError, WorkerPool
from rlx.workers.worker_process import WorkerLimits
from tests.fixtures.evaluator_fleet import Fleet

ROWS = [{"question": f"what is {k}?", "answer": str(k)} for k in range(16)]


@pytest.fixture(scope="module")
def shared(agents):
    """An evaluator whose agent is the row's, with its engine and workflow; nothing is retried."""
    engine = agents.engine()
    workflow = AgentWorkflow(
        f"{agents.classes}:AsTheRowSays", agents.tokenizer(), agents.sampling, 2
    )
    before = descendants(os.getpid())
    with Evaluator(Fleet(agents, engine).connect, workflow, patience=Patience(attempts=1)) as run:
        yield SimpleNamespace(run=run, engine=engine, workflow=workflow)
    assert descendants(os.getpid()) == before  # its process ended with the evaluator


def rows_of(agent, rows=ROWS, **options):
    return [{**row, "agent": agent, "options": options} for row in rows]


def test_sixty_four_runs_at_once_are_sixty_four_trajectories_of_their_own(shared, agents):
    rows = rows_of("Repeat", turns=3)
    shared.run.export_stats()
    shared.engine.gather(64)
    groups = shared.run.rollout_batch(rows, n=4, timeout=60)
    assert [g.row for g in groups] == rows
    for group, row in zip(groups, ROWS, strict=True):
        assert [t.trajectory_id for t in group.trajectories] == [
            f"{group.group_id}.{i}" for i in range(4)
        ]
        for t in group.trajectories:
            assert (t.reward, t.agent) == (1.0, "AsTheRowSays")
            assert t.prompt == f"<|user|>{row['question']}<|end|><|assistant|>"
            again = f"<|user|>again 1 {row['question']}<|end|><|assistant|>"
            assert again in t.completion
            assert sorted(set(t.turn_ids.tolist())) == [0, 1, 2]
            drawn = agents.tokenizer().decode(t.tokens[t.loss_mask].tolist())
            parts = (row["question"], f"again 0 {row['question']}", f"again 1 {row['question']}")
            assert drawn == "".join(f"{part}<|end|>" for part in parts)
            assert (t.versions[~t.loss_mask] == -1).all()
            assert (t.behaviour_logprobs[~t.loss_mask] == 0).all()
            assert (t.behaviour_logprobs[t.loss_mask] < 0).all()
            assert t.behaviour_logprobs.shape == t.tokens.shape
    stats = shared.run.export_stats()
    assert (stats["num_trajectories"], stats["reward"]) == (64, 1.0)
    assert stats["info/interactions"] == 3.0


def test_draws_are_a_function_of_the_seed_alone(shared, monkeypatch):
    monkeypatch.setattr(shared.engine, "reply", lambda prompt, seed, index: f"{seed}")

    def texts(order):
        rows = rows_of("Repeat")
        futures = {k: shared.run.submit(rows[k], n=3, group_id=k, seed=k) for k in order}
        return [[t.completion for t in futures[k].result(60).trajectories] for k in sorted(order)]

    one = texts(range(4))
    assert one == texts((3, 1, 0, 2))
    assert len({text for group in one for text in group}) == 12
    shared.run.wait()


def test_the_tutorials_agent_works_that_gives_no_key(shared):
    rows = [{"question": "x", "answer": "x"}, {"question": "y", "answer": "z"}]
    groups = shared.run.rollout_batch(rows_of("NoKey", rows), timeout=60)
    assert [t.reward for g in groups for t in g.trajectories] == [1.0, 1.0, 0.0, 0.0]


def test_rewards_by_completion_are_each_on_a_turn_of_its_own(shared, agents):
    (group,) = shared.run.rollout_batch(rows_of("Credits")[:1], n=2, timeout=60)
    number = group.group_id
    assert [t.trajectory_id for t in group.trajectories] == [f"{number}.0", f"{number}.1"]
    assert [t.turn_rewards for t in group.trajectories] == [(1.25, 1.0, 1.0)] * 2
    first, second = trajectories.samples(group, 2)
    assert len(first) == len(second) == 1
    record = trajectories.record(first, agents.tokenizer())
    assert (record["reward"], record["completion"]) == (1.0, "more")  # of the last completion
    assert record["tokens"] == sum(t.num_trained for t in first)
    said = [turn["completion"] for turn in record["turns"]]
    assert said == ["what is 0?<|end|>", "more<|end|>", "more<|end|>"]
    with pytest.raises(UserError, match="returned 2 samples, not n=3"):
        trajectories.samples(group, 3)


@pytest.mark.parametrize("export", trajectories.EXPORTS)
def test_an_evaluation_counts_each_completion_once_however_training_exports(export, agents):
    options = AgentOptions(export=export)
    name = f"{agents.classes}:Fork"
    workflow = AgentWorkflow(name, agents.tokenizer(), agents.sampling, 1, options=options)
    with Evaluator(Fleet(agents, agents.engine()).connect, workflow) as run:
        row = {"question": "x"}
        (training,) = run.rollout_batch([row], timeout=60)
        (group,) = run.rollout_batch([row], sampling=Sampling(max_new_tokens=99), timeout=60)
    record = trajectories.record(group.trajectories, agents.tokenizer())
    said = [turn["completion"] for turn in record["turns"]]
    assert said == ["x<|end|>", "one<|end|>", "two<|end|>"]
    assert record["tokens"] == sum(len(agents.tokenizer()(text)["input_ids"]) for text in said)
    trained = sum(t.num_trained for t in training.trajectories)
    assert (trained > record["tokens"]) == (export == "concat")


def test_a_reward_may_be_told_after_the_run_by_another_process(agents):
    options = AgentOptions(reward_seconds=30)
    name = f"{agents.classes}:ToldLater"
    workflow = AgentWorkflow(name, agents.tokenizer(), agents.sampling, 1, options=options)
    with Evaluator(Fleet(agents, agents.engine()).connect, workflow) as run:
        rows = [{"question": "x", "how": how} for how in ("by run", "by id")]
        groups = run.rollout_batch(rows, timeout=60)
    assert [t.reward for g in groups for t in g.trajectories] == [3.0, 0.5]


def test_a_library_that_needs_the_main_thread_has_it(shared):
    row = {"question": r"\boxed{\frac{1}{2}}", "answer": r"$\frac{2}{4}$"}
    (group,) = shared.run.rollout_batch(rows_of("MathVerify", [row]), n=1, timeout=60)
    assert group.trajectories[0].reward == 1.0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", r"LookupError: no such tool \(.*, line \d+\)\nTraceback"),
        ("exits", "SystemExit: 3"),
        ("nan", "run returned nan; rewards must be finite"),
        ("none", "run returned None"),
        ("text", "run returned 'good', a str"),
        ("other", "run rewards 'id', which is no completion of this run"),
        ("silent", "asked for no completion; does it use the base_url"),
        ("dies", r"process died \(exit code 3\)"),
    ],
)
def test_a_run_that_fails_names_agent_row_and_reason(shared, how, said):
    row = {"question": "which row?", "how": how}
    with pytest.raises(RolloutError, match=said) as error:
        shared.run.submit(rows_of("Misbehaves", [row])[0], n=1).result(60)
    assert "agent AsTheRowSays failed on row {'question': 'which row?'" in str(error.value)
    (well,) = rows_of("Misbehaves", [{"question": "x", "how": "well"}])
    assert shared.run.submit(well, n=1).result(60).trajectories[0].reward == 1.0
    shared.run._waiting.clear()


def test_a_run_that_is_given_up_is_ended_down_to_the_engine(agents):
    engine = agents.engine(lambda *_: "x" * 190)
    engine.step_seconds = 0.2
    workflow = AgentWorkflow(f"{agents.classes}:Repeat", agents.tokenizer(), agents.sampling, 2)
    with Evaluator(Fleet(agents, engine).connect, workflow) as run:
        run.submit(ROWS[0])
        wait_until(lambda: engine.running == 2)
    wait_until(lambda: engine.running == 0)
    assert engine.aborted == 2


def test_training_is_strict_about_temperature_and_evaluation_is_not(shared):
    (row,) = rows_of("Repeat", ROWS[:1], temperature=0.5)
    with pytest.raises(RolloutError, match="differs from training's 1"):
        shared.run.submit(row).result(60)
    greedy = Sampling(temperature=0.0, max_new_tokens=50)
    assert shared.run.submit(row, sampling=greedy).result(60).trajectories[0].reward == 1.0
    shared.run._waiting.clear()


def test_what_cannot_be_given_to_an_agent_is_the_users_mistake(shared, agents):
    with pytest.raises(UserError, match="rows are JSON"):
        shared.run.rollout_batch([{"question": object()}], timeout=60)
    with pytest.raises(UserError, match="is a workflow of rlx, not an agent"):
        AgentWorkflow("rlx.rollout.workflows:RLVR", agents.tokenizer(), Sampling(), 1)

    class Local:
        async def run(self, data, **extra_kwargs):
            return 1.0

    with pytest.raises(UserError, match="is not at the top of a module"):
        AgentWorkflow(Local, agents.tokenizer(), Sampling(), 1)


@pytest.mark.parametrize(("name", "workers"), [("Counter", 1), ("Blocking", 2)])
def test_runs_share_no_state_and_may_wait_synchronously(agents, name, workers):
    workflow = AgentWorkflow(
        f"{agents.classes}:{name}",
        agents.tokenizer(),
        agents.sampling,
        2,
        options=AgentOptions(workers=workers),
    )
    with Evaluator(Fleet(agents, agents.engine()).connect, workflow) as run:
        groups = run.rollout_batch(ROWS[:2], timeout=60)
    assert {t.reward for g in groups for t in g.trajectories} == {1.0}


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def workers(agents, cancel_seconds=10.0, **options):
    kind = worker_kind(f"{agents.classes}:Misbehaves", {}, AgentOptions(**options))
    return WorkerPool(replace(kind, cancel_seconds=cancel_seconds), 1)


async def row_of(g, own, how):
    session = g.gateway.sessions.open(g.session.defaults)
    data = {"how": how, "messages": [{"role": "user", "content": "x"}]}
    return await run_agent(own, data, g.gateway.base_url(session), session.key)


def test_a_run_that_will_not_stop_is_killed_and_its_neighbours_are_moved(agents):
    async def main():
        async with agents.gateway() as g:
            others = set(descendants(os.getpid()))
            own = workers(agents, cancel_seconds=1.0)
            await own.start()
            stubborn = asyncio.create_task(row_of(g, own, "stubborn"))
            beside = asyncio.create_task(row_of(g, own, "waits"))
            while len(g.engine.requests) < 2 or g.engine.running:
                await asyncio.sleep(0.01)
            given_up = asyncio.create_task(row_of(g, own, "waits"))
            while len(g.engine.requests) < 3:
                await asyncio.sleep(0.01)
            given_up.cancel()  # the agent is cancelled and says so: nothing is killed
            await asyncio.sleep(1.5)
            assert not beside.done()
            before = {*descendants(os.getpid())} - others
            stubborn.cancel()
            with pytest.raises(Evicted):
                await beside
            assert await row_of(g, own, "well") == 1.0
            assert before
            assert not before & {*descendants(os.getpid())}
            await own.close()

    agents.run(main())


def test_a_run_given_up_before_it_began_costs_no_process(agents):
    async def main():
        async with agents.gateway() as g:
            own = workers(agents, cancel_seconds=1.0)
            await own.start()
            before = descendants(os.getpid())
            given_up = asyncio.create_task(row_of(g, own, "well"))
            for _ in range(3):  # until it is sent
                await asyncio.sleep(0)
            given_up.cancel()  # sent together with the beginning
            await asyncio.sleep(1.5)
            assert descendants(os.getpid()) == before
            assert await row_of(g, own, "well") == 1.0
            await own.close()

    agents.run(main())


def test_who_blocks_the_loop_for_too_long_is_killed_and_the_line_is_named(agents):
    async def main():
        async with agents.gateway() as g:
            own = workers(agents, block_seconds=1.0)
            with pytest.raises(WorkerError, match=r"agent_classes.py:\d+ .*time.sleep") as error:
                await row_of(g, own, "blocks")
            assert "blocked the event loop" in str(error.value)
            await own.close()

    agents.run(main())


class Rows:
    dealt = 0

    def next(self):
        self.dealt += 1
        return self.dealt - 1, ROWS[(self.dealt - 1) % len(ROWS)]

    def row(self, number):
        return ROWS[number % len(ROWS)]

    def index(self, number):
        return number % len(ROWS)


def collected(agents, workflow, **options):
    """The first batch that an executor makes with `workflow`."""
    fleet = Fleet(agents, agents.engine())
    executor = Executor(workflow, Rows(), Limits(2, 1, 4), fleet, request_timeout=30, **options)
    executor.start()
    try:
        executor.loop.run(fleet.connect())
        executor.set_version(0)
        return executor.collect()
    finally:
        executor.loop.run(fleet.close())
        executor.close()


def repeat(agents):
    return AgentWorkflow(
        f"{agents.classes}:Repeat", agents.tokenizer(), agents.sampling, 2, kwargs={"turns": 2}
    )


def test_the_executor_trains_on_agents_by_the_same_workflow(agents):
    workflow = repeat(agents)
    groups = collected(agents, workflow)
    assert workflow._front is None  # closed with the executor
    assert [len(g.trajectories) for g in groups] == [2, 2]
    assert all(t.reward == 1.0 for g in groups for t in g.trajectories)


def test_an_agent_s_conversation_that_training_has_no_room_for_is_a_failure(agents):
    wanted = r"workflow Repeat \(.*agent_classes.py, line \d+\) gave, for row .*what is \d+.*, "
    with pytest.raises(RolloutError, match=wanted + r"trajectory .* tokens, .* room for 30 "):
        collected(
            agents,
            repeat(agents),
            max_tokens=30,
            patience=Patience(rate=0.0, attempts=1, outage=0.0),
        )


class Counted(Rows):
    """Rows whose agent does what their number says: most are well, each third misbehaves once."""

    def __init__(self, place):
        self.place = place

    def next(self):
        self.dealt += 1
        return self.dealt - 1, self.row(self.dealt - 1)

    def row(self, number):
        return {"question": f"what is {number}?", "answer": "", "number": number,
                "place": str(self.place)}  # fmt: skip

    def index(self, number):
        return number


@pytest.mark.slow
def test_faults_of_many_kinds_lose_no_row_and_train_on_none_twice(agents, tmp_path):
    """Agents raise, exit, hang, are killed in flight by the kernel, and calls of theirs fail."""
    options, others = AgentOptions(workers=2, block_seconds=2.0), descendants(os.getpid())
    workflow = AgentWorkflow(
        f"{agents.classes}:Unlucky", agents.tokenizer(), agents.sampling, 2, options=options
    )
    engine = agents.engine()
    engine.step_seconds = 0.01
    fleet = Fleet(agents, engine)
    rows, skipped = Counted(tmp_path), []
    executor = Executor(
        workflow, rows, Limits(4, 2, 8), fleet, request_timeout=20,
        patience=Patience(attempts=20, rate=1.0, pause=0.01), on_skip=skipped.append,
    )  # fmt: skip
    executor.start()
    seen, killed = [], 0
    try:
        executor.loop.run(fleet.connect())
        executor.set_version(0)
        for step in range(1, 7):
            if step % 2:  # a process with runs in it, by signal 9
                wait_until(lambda: engine.running)
                supervisors = (pid for pid in descendants(os.getpid()) if pid not in others)
                os.kill(next(supervisors), signal.SIGKILL)
                killed += 1
            batch = executor.collect()
            engine.version = step
            executor.set_version(step)
            seen += batch
            for group in batch:
                assert step - 1 - group.oldest_version <= 2
                check_tokens(group)
    finally:
        executor.loop.run(fleet.close())
        executor.close()
    assert not skipped
    assert killed == 3
    assert sorted(g.group_id for g in seen) == sorted({g.group_id for g in seen})
    assert len(seen) == 24
    assert max(g.group_id for g in seen) < 24 + 2 * 4 + 8  # what was admitted first is not left
    tried = [p.name for p in tmp_path.iterdir()]
    assert {name.partition("-")[0] for name in tried} == {"raises", "exits", "blocks", "dies"}
    ids = [t.trajectory_id for g in seen for t in g.trajectories]
    assert len(set(ids)) == len(ids) == 2 * len(seen)


def check_tokens(group):
    """Each run is one conversation of two turns, of its own row, with version and logprob."""
    for t in group.trajectories:
        assert t.prompt == f"<|user|>{group.row['question']}<|end|><|assistant|>"
        assert t.turn_ids[t.loss_mask].tolist() == sorted(t.turn_ids[t.loss_mask].tolist())
        assert set(t.turn_ids.tolist()) == {0, 1}
        assert ((t.versions >= 0) == t.loss_mask).all()
        assert ((t.behaviour_logprobs < 0) == t.loss_mask).all()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_agents_ask_no_proxy_for_the_gateway(agents, monkeypatch, name):
    for each in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "no_proxy"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("NO_PROXY", "example.com")
    options = AgentOptions(limits=WorkerLimits(environment=(name,)))
    agent = f"{agents.classes}:OwnClient"
    workflow = AgentWorkflow(agent, agents.tokenizer(), agents.sampling, 1, options=options)

    async def main():
        async with agents.fleet(agents.engine()) as (fleet, _):
            try:
                row = {"question": "q", "answer": "q"}
                return await workflow.run(fleet, Task(row, 1, 1))
            finally:
                await workflow.aclose()

    (trajectory,) = agents.run(main(), 60).trajectories
    assert trajectory.reward == 1.0


def test_a_start_that_is_given_up_begins_again(agents, monkeypatch):
    """As by the timeout of the first attempt; else all later ones ask a gateway without a port."""

    async def main():
        workflow, fleet, begun = repeat(agents), object(), asyncio.Event()

        async def hang(gateway):
            if not begun.is_set():
                begun.set()
                await asyncio.Event().wait()

        async def start(workers):
            pass

        monkeypatch.setattr(workflow._gateway_class, "start", hang)
        monkeypatch.setattr(WorkerPool, "start", start)
        first = asyncio.create_task(workflow._front_of(fleet))
        await begun.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert workflow._front is None
        assert (await workflow._front_of(fleet)).fleet is fleet
        await workflow.aclose()

    asyncio.run(main())


def test_an_agent_that_runs_again_after_a_kill_gets_the_answers_that_it_had(agents):
    """Its first two answers, whole or in part; its requests have the seeds of before."""
    engine, notes = agents.engine(step_seconds=0.01), []
    host = {"step": 0, "cursor": {"position": 1}, "pending": [[0, 0]]}
    row = rows_of("Repeat", turns=3)[0]

    def note(kind, fields, group):
        data = records.encode(len(notes), kind, fields, records.pack(group))
        notes.extend(records.scan(data))

    async def main():
        async with agents.fleet(engine) as (fleet, _):
            workflow = AgentWorkflow(
                f"{agents.classes}:AsTheRowSays", agents.tokenizer(), agents.sampling, 2
            )
            whole = await workflow.run(fleet, Task(row, 0, 7))
            asked, first = len(engine.requests), Unfinished(note)
            killed = asyncio.create_task(workflow.run(first.begin(0, fleet, 7), Task(row, 0, 7)))
            while len(engine.requests) < asked + 5:  # some of the third answers are under way
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            first.write()
            killed.cancel()
            await asyncio.gather(killed, return_exceptions=True)
            second = Unfinished(note)
            second.restore(history.recover(host, (0, -1), notes).samples, {0}, ended=False)
            had, asked = second.counts(), len(engine.requests)
            again = await workflow.run(second.begin(0, fleet, 7), Task(row, 0, 7))
            second.end(0)
            await workflow.aclose()
            return whole, again, second, had, engine.requests[asked:]

    whole, again, second, had, asked = agents.run(main())
    assert had["samples"] >= 4
    assert (second.continued, second.repeated) == (had["tokens"], 0)
    assert len(asked) <= 2
    for a, b in zip(whole.trajectories, again.trajectories, strict=True):
        assert (a.tokens.tolist(), a.reward) == (b.tokens.tolist(), b.reward)
