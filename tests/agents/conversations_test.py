"""Which completion goes on from which, whatever the template and the agent make of the answers.

The oracle knows the true tree of each run's conversations, as the script of the run has it.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from types import SimpleNamespace

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.agents import trajectories
from rlx.agents.api_gateway import Gateway

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)
_TOOLS = (
    "{# <think></think> #}{% if tools %}<|system|><tool_call>{{ tools | length }}<|end|>{% endif %}"
)
TEMPLATES = {
    "keeps": _TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}" + _CALLS
    + "<|end|>{% endfor %}<|assistant|>",
    "drops": _TOOLS + "{% for m in messages %}<|{{ m.role }}|>"
    "{{ (m.content or '').split('</think>')[-1].strip() }}" + _CALLS
    + "<|end|>{% endfor %}<|assistant|>",
    "forces": _TOOLS + "{% for m in messages %}<|{{ m.role }}|>"
    "{{ (m.content or '').split('</think>')[-1] }}" + _CALLS
    + "<|end|>{% endfor %}<|assistant|><think>",
}  # fmt: skip
STOP = "\nObservation:"
ROUTES = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}


class Site:
    """Start a gateway for each template, in front of one engine with scripted answers."""

    def __init__(self, agents, loop):
        self.agents, self.loop, self.stack = agents, loop, AsyncExitStack()
        self.answers = []
        self.engine = agents.engine(lambda prompt, seed, index: self.answers[index])
        self.gateways = {}

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    async def start(self):
        fleet, _ = await self.stack.enter_async_context(self.agents.fleet(self.engine))
        self.http = await self.stack.enter_async_context(aiohttp.ClientSession())
        for name, template in TEMPLATES.items():
            gateway = self.gateways[name] = Gateway(fleet, self.agents.tokenizer(template))
            await gateway.start()
            self.stack.push_async_callback(gateway.stop)

    def opened(self, template):
        """A talk in a session of its own."""
        gateway = self.gateways[template]
        session = gateway.sessions.open(self.agents.sampling)
        return SimpleNamespace(session=session, url=gateway.base_url(session), sent=[])

    async def ask(self, talk, api, messages, answers, *, retries=0, **fields):
        """Ask in the words of an API; return the answer's id and its choices as messages."""
        self.answers = answers
        body = {"model": "m", **WRITE[api](messages, fields)}
        headers = {"x-stainless-retry-count": str(retries)}
        async with self.http.post(talk.url + ROUTES[api], json=body, headers=headers) as answer:
            found = await answer.json()
            assert answer.status == 200, found
        request, tokens = self.engine.requests[-1], []
        interactions = [i for i in talk.session.interactions if i.completion_id == found["id"]]
        for i in sorted(interactions, key=lambda i: i.choice):
            tokens.append([*request.prompt_tokens.tolist(), *i.completion.tokens.tolist()])
        talk.sent.append(SimpleNamespace(id=found["id"], tokens=tokens))
        return found["id"], READ[api](found)


def _chat(messages, fields):
    if fields.pop("tools", False):
        fields["tools"] = [{"type": "function", "function": TOOL}]
    return {"messages": messages, **fields}


def _responses(messages, fields):
    items = []
    for m in messages:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["tool_call_id"],
                          "output": m["content"]})  # fmt: skip
            continue
        if m["content"] or not m.get("tool_calls"):
            items.append({"role": m["role"], "content": m["content"]})
        items += [{"type": "function_call", "call_id": c["id"], **c["function"]}
                  for c in m.get("tool_calls", ())]  # fmt: skip
    tools = [{"type": "function", **TOOL}] if fields.pop("tools", False) else []
    return {"input": items, "tools": tools}


def _messages(messages, fields):
    out = []
    for m in messages:
        if m["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": m["tool_call_id"],
                     "content": m["content"]}  # fmt: skip
            out.append({"role": "user", "content": [block]})
            continue
        blocks = [{"type": "text", "text": m["content"]}] if m["content"] else []
        blocks += [{"type": "tool_use", "id": c["id"], "name": c["function"]["name"],
                    "input": json.loads(c["function"]["arguments"])}
                   for c in m.get("tool_calls", ())]  # fmt: skip
        out.append({"role": m["role"], "content": blocks})
    tools = [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]
    given = {"stop_sequences": fields["stop"]} if "stop" in fields else {}
    tooled = {"tools": tools} if fields.get("tools") else {}
    return {"messages": out, "max_tokens": 200, **given, **tooled}


def _of_chat(found):
    return [
        {k: v for k, v in c["message"].items() if k in ("role", "content", "tool_calls")}
        for c in found["choices"]
    ]


def _of_responses(found):
    texts = [p["text"] for o in found["output"] if o["type"] == "message" for p in o["content"]]
    calls = [{"id": o["call_id"], "type": "function",
              "function": {"name": o["name"], "arguments": o["arguments"]}}
             for o in found["output"] if o["type"] == "function_call"]  # fmt: skip
    return [_message("".join(texts), calls)]


def _of_messages(found):
    calls = [{"id": b["id"], "type": "function",
              "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
             for b in found["content"] if b["type"] == "tool_use"]  # fmt: skip
    return [_message("".join(b["text"] for b in found["content"] if b["type"] == "text"), calls)]


def _message(text, calls):
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


WRITE = {"chat": _chat, "responses": _responses, "messages": _messages}
READ = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}


@pytest.fixture(scope="module")
def site(agents):
    loop = asyncio.new_event_loop()
    found = Site(agents, loop)
    found.run(found.start())
    yield found
    found.run(found.stack.aclose())
    loop.close()


@pytest.mark.parametrize("api", ROUTES)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("stops", [False, True])
def test_the_last_reward_reaches_each_turn_of_its_conversation(site, template, api, stops):
    fields = {"stop": [STOP]} if stops and api != "responses" else {}
    thought = {"forces": "hm</think>"}.get(template, "" if stops else "<think>hm</think>")

    async def run():
        talk, messages = site.opened(template), [{"role": "user", "content": "go"}]
        for turn in range(3):
            answers = [f"{thought}I see {turn}." + (STOP if fields else "")]
            _, (message,) = await site.ask(talk, api, messages, answers, **fields)
            assert message["content"] == f"I see {turn}."
            messages += [message, {"role": "user", "content": f"and {turn}"}]
        return talk.session.interactions

    made = site.run(run())
    value = {made[-1].completion_id: 1.0}
    assert trajectories.turn_returns(made, value, 1.0) == [1.0, 1.0, 1.0]
    assert trajectories.turn_returns(made, value, 0.5) == [0.25, 0.5, 1.0]
    assert trajectories.turn_returns(made, 1.0, 0.5) == [0.25, 0.5, 1.0]
    rows = trajectories.of_run(made, value, "0.0", turn_discount=0.5)
    whole = template == "keeps" or (template == "drops" and stops)
    turns = [[0, 1, 2]] if whole else [[0], [1], [2]]
    assert [sorted(set(row.turn_ids.tolist())) for row in rows] == turns


def test_a_prompt_that_holds_all_that_was_said_goes_on_from_it(site):
    """As frameworks for completions ask: one message that grows."""

    async def run():
        talk, words = site.opened("keeps"), "What is 6 times 7?\nThought:"
        for turn in range(3):
            answers = [f" I multiply.\nAction: look {turn}{STOP}"]
            messages = [{"role": "user", "content": words}]
            _, (said,) = await site.ask(talk, "chat", messages, answers, stop=[STOP])
            words += f"{said['content']}\nObservation: {turn}\nThought:"
        await site.ask(talk, "chat", [{"role": "user", "content": "What is 6?"}], ["6"])
        return talk.session.interactions

    assert [i.after for i in site.run(run())] == [None, 0, 1, None]


def test_of_several_answers_the_one_that_was_taken_up_is_gone_on_from(site):
    async def run():
        talk, asked = site.opened("drops"), [{"role": "user", "content": "go"}]
        _, (one, two) = await site.ask(talk, "chat", asked, ["left", "left or right"], n=2)
        for message in (one, two, {"role": "assistant", "content": "left or"}):
            await site.ask(talk, "chat", [*asked, message, asked[0]], ["on"])
        other = [{"role": "system", "content": "be brief"}, *asked]
        await site.ask(talk, "chat", other, ["left"])
        await site.ask(talk, "chat", [*other, one, asked[0]], ["on"])
        shot = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        for question in ("3-1", "5-3"):  # answered as the example is
            await site.ask(talk, "chat", [*shot, {"role": "user", "content": question}], ["2"])
        return talk.session.interactions

    afters = [i.after for i in site.run(run())]
    assert afters == [None, None, 0, 1, 1, None, 5, None, None]


def test_an_answer_that_was_lost_on_the_way_is_not_trained_on(site):
    asked = [{"role": "user", "content": "go"}]

    async def run():
        talk = site.opened("drops")
        for retries in range(3):
            _, (message,) = await site.ask(talk, "chat", asked, ["north"], retries=retries)
        await site.ask(talk, "chat", [*asked, message, asked[0]], ["on"])
        await site.ask(talk, "chat", asked, ["south"])  # asked for anew, and answered
        site.engine.room, before = 1, site.engine.room
        with pytest.raises(AssertionError):  # no answer, so no answer was lost
            await site.ask(talk, "chat", asked, ["south"])
        site.engine.room = before
        await site.ask(talk, "chat", asked, ["south"], retries=1)
        return talk.session.interactions

    made = site.run(run())
    assert trajectories.delivered(made, 1.0) == [2, 3, 4, 5]
    assert [i.after for i in made] == [None, None, None, 2, None, None]
    for export in trajectories.EXPORTS:
        rows = trajectories.of_run(made, 1.0, "0.0", export=export)
        assert sum(row.num_trained for row in rows) == sum(
            len(i.completion.tokens) for i in made[2:]
        )
        assert rows[0].info["lost_answers"] == 2.0
    own = {made[0].completion_id: 1.0}  # who rewards an answer has seen it
    assert trajectories.delivered(made, own) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
def test_a_vendor_s_client_asks_again_and_the_lost_answer_is_known(site, vendor):
    asked = [{"role": "user", "content": "go"}]

    async def run():
        talk, passed, site.answers = site.opened("keeps"), [], ["north"]

        async def relay(request):
            """Passes everything on, and loses the first answer."""
            url, body = talk.url.removesuffix("/v1") + request.path, await request.read()
            headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
            async with site.http.post(url, data=body, headers=headers) as answer:
                passed.append(await answer.read())
            if len(passed) == 1:
                request.transport.close()
            return web.Response(body=passed[-1], content_type="application/json")

        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app)
        await runner.setup()
        front = web.TCPSite(runner, "127.0.0.1", 0)
        await front.start()
        url = f"http://127.0.0.1:{front._server.sockets[0].getsockname()[1]}"
        try:
            if vendor == "openai":
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
                    got = await client.chat.completions.create(model="m", messages=asked)
            else:
                async with anthropic.AsyncAnthropic(base_url=url, api_key="any") as client:
                    got = await client.messages.create(model="m", messages=asked, max_tokens=9)
        finally:
            await runner.cleanup()
        return talk.session.interactions, got.id

    made, name = site.run(run())
    assert len(made) == 2
    (row,) = trajectories.of_run(made, {name: 1.0}, "0.0")
    assert (row.reward, row.num_trained) == (1.0, len(made[1].completion.tokens))
    assert trajectories.delivered(made, 1.0) == [1]


STEPS = st.lists(
    st.fixed_dictionaries({
        "talk": st.integers(0, 5),
        "how": st.sampled_from(["on", "on", "on", "new", "fork", "again"]),
        "api": st.sampled_from(list(ROUTES)),
        "thinks": st.booleans(), "calls": st.booleans(), "stops": st.booleans(),
        "word": st.sampled_from(["yes", "no", "yes no"]),
        "lost": st.sampled_from([0, 0, 0, 1, 2]), "choices": st.sampled_from([1, 1, 1, 2]),
        "echo": st.sampled_from(["as it came", "trimmed", "with thoughts", "written anew"]),
    }), min_size=2, max_size=9,
)  # fmt: skip
RUNS = st.fixed_dictionaries({
    "steps": STEPS, "template": st.sampled_from(list(TEMPLATES)),
    "clock": st.booleans(),  # whether the system prompt has the time
    "window": st.sampled_from([0, 0, 2]),  # turns that the agent sends, 0: all
    "chosen": st.lists(st.integers(0, 30), max_size=4),  # which are rewarded
    "discount": st.sampled_from([1.0, 0.5]),
})  # fmt: skip


class Play:
    """Asks what a script of `RUNS` says; `nodes` are the answers, each with the true one before."""

    def __init__(self, site, run):
        self.site, self.run, self.talk = site, run, site.opened(run["template"])
        self.nodes, self.branches, self.count = [], [], 0

    async def play(self):
        for step in self.run["steps"]:
            await self.step(step)

    async def step(self, step):
        self.count += 1
        how, known = step["how"], self.branches
        if how == "new" or not known:
            known.append([])  # turns: (messages asked, the answer as it is sent back, node)
            branch = known[-1]
        else:
            branch = known[step["talk"] % len(known)]
            if how == "fork":
                branch = [*branch[: step["talk"] % (len(branch) + 1)]]
                known.append(branch)
        asked = [{"role": "user", "content": f"ask {self.count}"}]
        if how == "again" and branch:  # the last question, for another answer
            asked = branch.pop()[0]
        elif branch and branch[-1][1].get("tool_calls"):
            (call,) = branch[-1][1]["tool_calls"]
            asked = [{"role": "tool", "tool_call_id": call["id"], "content": f"saw {self.count}"}]
        await self.ask(step, branch, asked, unsure=how == "again" or step["choices"] == 2)

    async def ask(self, step, branch, asked, unsure):
        run, api = self.run, step["api"]
        system = [{"role": "system", "content": f"now {self.count}"}] * run["clock"]
        if api == "messages":
            system = []  # has another place there
        history = [m for turn in branch[-run["window"] :] for m in (*turn[0], turn[1])]
        choices = step["choices"] if api == "chat" else 1
        stop = {"stop": [STOP]} if step["stops"] and api != "responses" else {}
        for retries in range(step["lost"] + 1):
            words = [self.words(step, f"{self.count}.{retries}.{c}" if unsure else "", bool(stop))
                     for c in range(choices)]  # fmt: skip
            name, messages = await self.site.ask(
                self.talk, api, [*system, *history, *asked], words, retries=retries,
                tools=True, **stop, **({"n": choices} if choices > 1 else {}),
            )  # fmt: skip
            first = len(self.nodes)
            before = branch[-1][2] if branch else None
            for choice, tokens in enumerate(self.talk.sent[-1].tokens):
                self.nodes.append(SimpleNamespace(
                    id=name, choice=choice, before=before, tokens=tuple(tokens),
                    seen=retries == step["lost"],
                ))  # fmt: skip
        taken = step["talk"] % choices
        # Answers that their words alone do not identify are sent back unchanged.
        echo = step["echo"] if not (unsure or run["clock"] or run["window"]) else "as it came"
        branch.append((asked, self.echo(echo, messages[taken], words[taken]), first + taken))

    def words(self, step, mark, stops):
        words = "hm</think>" if self.run["template"] == "forces" else "<think>hm</think>"
        words = (words if step["thinks"] or mark else "") + f" {step['word']} {mark}\n"
        if step["calls"]:
            call = {"name": "look", "arguments": {"at": f"{mark} here"}}
            words += f"<tool_call>{json.dumps(call)}</tool_call>"
        return words + (STOP if stops and not step["calls"] else "")

    def echo(self, how, message, words):
        out = dict(message)
        if "tool_calls" in out:
            (call,) = out["tool_calls"]
            given = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
            out["tool_calls"] = [{**call, "function": {"name": "look", "arguments": given}}]
        elif how == "trimmed":
            out["content"] = out["content"].strip() or "-"
        elif how == "with thoughts":
            out["content"] = words.removesuffix(STOP)
        elif how == "written anew":
            out["content"] = f"I said {out['content'].strip()}."
        return out


def returns_of(nodes, value, discount):
    """The returns by recursion over the true tree."""
    below = {k: [c for c, n in enumerate(nodes) if n.before == k] for k in range(len(nodes))}

    def later(k):
        names = {nodes[c].id for c in below[k]}
        return discount * (sum(value.get(n, 0.0) for n in names) + sum(map(later, below[k])))

    def height(k):
        return max((1 + height(c) for c in below[k]), default=0)

    if not isinstance(value, dict):
        return [discount ** height(k) * value for k in below]
    return [value.get(nodes[k].id, 0.0) + later(k) for k in below]


@settings(deadline=None, max_examples=25)
@given(RUNS)
def test_every_answer_that_was_seen_is_exported_once_with_its_own_return(site, run):
    play = Play(site, run)
    site.run(play.play())
    nodes, made = play.nodes, play.talk.session.interactions
    seen = [n for n in nodes if n.seen]
    value = {seen[k % len(seen)].id: float(k) for k in run["chosen"]} or 1.0
    expected = returns_of(nodes, value, run["discount"])
    assert [(i.completion_id, i.choice) for i in made] == [(n.id, n.choice) for n in nodes]
    assert [i.after for i in made] == [n.before for n in nodes]
    for export in ("tree", "individual"):
        options = {"turn_discount": run["discount"], "export": export}
        rows, exported = trajectories.of_run(made, value, "0.0", **options), []
        for row in rows:
            ends = np.flatnonzero(np.diff(row.loss_mask.astype(int), append=0) == -1) + 1
            worth = row.turn_rewards or (row.reward,) * len(ends)
            for end, got in zip(ends, worth, strict=True):
                tokens = tuple(row.tokens[:end].tolist())
                (k,) = [k for k, n in enumerate(nodes)
                        if n.seen and n.tokens == tokens and k not in exported]  # fmt: skip
                assert got == pytest.approx(expected[k])
                exported.append(k)
            assert tuple(row.tokens.tolist()) == nodes[exported[-1]].tokens
        assert sorted(exported) == [k for k, n in enumerate(nodes) if n.seen]
        firsts = [row.trajectory_id for row in rows]
        assert firsts == sorted(firsts, key=lambda name: [int(x) for x in name.split(".")])
