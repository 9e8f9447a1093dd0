"""Tools inside generation: the model writes a call, is shown its output, and goes on.

A call is `<tool_call>{"name": …, "arguments": …}</tool_call>` where the chat template has tools in
that form (Hermes, Qwen); else, as for base models, it is what stands between markers of the tool,
JSON or its only argument, and the output comes as a fenced block.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.base import Group, UserError
from rlx.cli import user_code
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import tools as toolbox
from rlx.rollout.control_tokens import controls, shielded
from rlx.rollout.episode import Episode, begin, behind, together
from rlx.rollout.workflows import Generator, Prompts, Task, close, encode
from rlx.sandbox.sandbox import SandboxLost, SandboxOptions

_OUTPUT = "@@OUTPUT@@"  # stands for what a tool says


class ToolUse:
    """Answers in which the model uses tools, each with a verifiable reward.

    `tools` are names as `tools.load` takes them; `max_calls` and `max_seconds` are of an answer's
    calls together, `max_output_tokens` of what each says. `sampling.max_new_tokens` are all tokens
    after the prompt, outputs included; the rest is as of `RLVR`.
    """

    def __init__(
        self, prompts: Prompts, sampling: Sampling, reward_pool: RewardPool, n: int,
        sandbox: SandboxOptions, tools: Sequence[str] = (), max_calls: int = 4,
        max_seconds: float = 60.0, max_output_tokens: int = 256,
    ):  # fmt: skip
        self._prompts, self._tokenizer = prompts, prompts.tokenizer
        self._max_calls, self._max_seconds = max_calls, max_seconds
        self._max_output, template = max_output_tokens, self._tokenizer.chat_template
        if min(max_calls, max_seconds, max_output_tokens) <= 0:
            raise UserError("max_calls, max_seconds and max_output_tokens must be above 0")
        self._tools = {tool.name: tool for tool in toolbox.load(tools, sandbox)}
        self._ends, self._marked = dict[str, str](), dict[str, toolbox.Tool]()  # by start
        if "tools" in template and "<tool_call>" in template and "<function=" not in template:
            parts, self._ends = (
                ("name", "description", "parameters"),
                {"<tool_call>": "</tool_call>"},
            )
            listed = [{each: getattr(t, each) for each in parts} for t in self._tools.values()]
            self._prompts = prompts.told_of([{"type": "function", "function": f} for f in listed])
            around = behind(self._tokenizer, {"role": "tool", "content": _OUTPUT})
        else:
            around = f"\n```output\n{_OUTPUT}\n```\n"
            for name, tool in self._tools.items():
                pairs = {f"<{name}>": f"</{name}>", **getattr(tool, "markers", {})}
                self._ends |= pairs
                self._marked |= dict.fromkeys(pairs, tool)
        self._around = [encode(self._tokenizer, text) for text in around.split(_OUTPUT)]
        self._sampling, self._rewards, self._n = sampling, reward_pool, n

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Raise as `Prompts.check`, of the prompt with what it says about tools."""
        self._prompts.check(row, name)

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row."""
        stop = tuple(self._ends)
        episodes = await begin(fleet, self._prompts, task, self._sampling, self._n, stop)
        used = await together(*(self._answer(fleet, episode) for episode in episodes))
        graded = await self._rewards.grade([episode.graded_as() for episode in episodes])
        parts = zip(episodes, graded.rewards, graded.infos, used, strict=True)
        found = [episode.trajectory(r, {**info, **use}) for episode, r, info, use in parts]
        return Group(task.group_id, tuple(found), task.row)

    async def aclose(self) -> None:
        """End what the tools hold."""
        for tool in self._tools.values():
            await close(tool)

    async def _answer(self, fleet: Generator, episode: Episode) -> dict[str, float]:
        """Bring an answer to its end; return what its calls came to."""
        calls = right = cut = 0
        seconds, over, clock = 0.0, "", asyncio.get_running_loop().time
        while not episode.ended:
            if calls == self._max_calls:
                over = "calls"
                break
            start, body = self._call(episode.words)
            while body is None and not episode.ended:
                await episode.sample(fleet, [self._ends[start]])
                start, body = self._call(episode.words)
            if body is None or not episode.left:
                break
            began, calls = clock(), calls + 1
            try:
                async with asyncio.timeout(self._max_seconds - seconds):
                    said, good = await self._run(start, body)
            except TimeoutError:
                over = "seconds"
                break
            finally:
                seconds += clock() - began
            output, whole = self._observation(said)
            right, cut = right + good, cut + (not whole)
            if episode.show(output):
                await episode.sample(fleet, tuple(self._ends))
        if over:
            episode.cut()
        elif episode.truncated:
            over = "tokens"
        told: dict[str, float] = {"calls": calls, "seconds": seconds, "outputs_cut": cut}
        told |= {f"over_{budget}": budget == over for budget in ("calls", "seconds", "tokens")}
        told |= {"success": right / calls} if calls else {}
        return {f"tools/{name}": float(value) for name, value in told.items()}

    def _call(self, words: str) -> tuple[str, str | None]:
        """Return the first start marker, and the call behind it, None where it has no end yet.

        JSON ends where it is whole: an end marker in one of its texts ends nothing.
        """
        starts = [start for start in self._ends if start in words]
        start = min(starts, key=lambda each: (words.index(each), -len(each)))
        rest, unfinished = words.partition(start)[2], False
        if self._argument(start) is None:
            try:
                blank = len(rest) - len(rest.lstrip())
                return start, rest[: json.JSONDecoder().raw_decode(rest, blank)[1]]
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string")
            except (ValueError, RecursionError):  # `_read` raises the same
                pass
        body, end, _ = rest.partition(self._ends[start])
        return start, body if end and not unfinished else None

    def _argument(self, start: str) -> str | None:
        """Return the only argument of a marked tool, which its text is; None: calls are JSON."""
        known = self._marked[start].parameters["properties"] if start in self._marked else {}
        return next(iter(known)) if [a.get("type") for a in known.values()] == ["string"] else None

    async def _run(self, start: str, body: str) -> tuple[str, bool]:
        """Return what a call says, and whether it succeeded."""
        try:
            return await toolbox.call(*self._read(start, body)), True
        except SandboxLost:  # no fault of the model: the attempt fails
            raise
        except Exception as error:  # of a user's tool, whatever it likes
            known = isinstance(error, toolbox.ToolError)
            return f"Error: {error if known else user_code.words(error)}", False

    def _read(self, start: str, body: str) -> tuple[toolbox.Tool, Mapping[str, Any]]:
        """Return tool and arguments of a call; ToolError where they cannot be read."""
        tool = self._marked.get(start)
        if tool and (name := self._argument(start)):
            return tool, {name: body.strip("\n")}
        try:
            found = json.loads(body)
            name, arguments = (tool.name, found) if tool else (found["name"], found["arguments"])
            return self._tools[name], {**arguments}
        except (ValueError, TypeError, KeyError, RecursionError):
            known = tool.parameters["properties"] if tool else {}
            wanted = ", ".join(known) if tool else f"name: {' or '.join(self._tools)}, arguments"
            raise toolbox.ToolError(f"a call is a JSON object of {wanted}") from None

    def _observation(self, said: str) -> tuple[list[int], bool]:
        """Return the tokens of an output, none of them special, and whether all of it is there."""
        most, longest = self._max_output, 64 * self._max_output  # characters
        if long := len(said) > 2 * longest:
            said = f"{said[:longest]}...{said[-longest:]}"
        ids = encode(self._tokenizer, shielded(said, controls(self._tokenizer).strict))
        if len(ids) > most:
            dots, half = encode(self._tokenizer, "..."), most // 2
            long, ids = True, [*ids[: most - half], *dots, *ids[len(ids) - half :]]
        before, after = self._around
        return [*before, *ids, *after], not long
