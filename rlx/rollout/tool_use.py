"""Tools inside generation: the model writes a call, reads its output, and continues.

A call is `<tool_call>{"name": …, "arguments": …}</tool_call>` if the chat template has that form
(Hermes, Qwen). Otherwise, as for base models, it is JSON or the only argument between the tool's
markers, and the output is a fenced block.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.base import Group, PromptTokens, UserError
from rlx.cli import user_code
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import tools as toolbox
from rlx.rollout.control_tokens import controls, shielded
from rlx.rollout.episode import Episode, begin, between_answers
from rlx.rollout.images import IN_TEXT, ImagePrompts
from rlx.rollout.workflows import Generator, Prompts, Task, close, encode
from rlx.sandbox.sandbox import SandboxLost, SandboxOptions
from rlx.system.threads import run_all

_OUTPUT = "@@OUTPUT@@"  # stands for a tool's output


class ToolUse:
    """Answers in which the model uses tools, each with a verifiable reward.

    `max_calls` and `max_seconds` are totals of an answer, `max_output_tokens` a limit per call.
    Outputs count towards `sampling.max_new_tokens`.
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
            what = f"{max_calls=}, {max_seconds=}, {max_output_tokens=}"
            raise UserError(f"{what} in rollout.workflow_kwargs; give numbers above 0")
        self._tools = {tool.name: tool for tool in toolbox.load(tools, sandbox)}
        self._ends, self._marked = dict[str, str](), dict[str, toolbox.Tool]()  # by start
        if "tools" in template and "<tool_call>" in template and "<function=" not in template:
            self._ends = {"<tool_call>": "</tool_call>"}
            parts = ("name", "description", "parameters")
            listed = [{each: getattr(t, each) for each in parts} for t in self._tools.values()]
            described = [{"type": "function", "function": function} for function in listed]
            self._prompts = prompts.with_tools(described)
            around = between_answers(self._tokenizer, {"role": "tool", "content": _OUTPUT})
        else:
            around = f"\n```output\n{_OUTPUT}\n```\n"
            for name, tool in self._tools.items():
                pairs = {f"<{name}>": f"</{name}>", **getattr(tool, "markers", {})}
                self._ends |= pairs
                self._marked |= dict.fromkeys(pairs, tool)
        self._around = [encode(self._tokenizer, text) for text in around.split(_OUTPUT)]
        self._sampling, self._rewards, self._n = sampling, reward_pool, n

    def check(self, row: Mapping[str, Any], name: str) -> None:
        """Check the prompt, which describes the tools, as `Prompts.check`."""
        self._prompts.check(row, name)

    async def run(self, fleet: Generator, task: Task) -> Group:
        stop = tuple(self._ends)
        episodes = await begin(fleet, self._prompts, task, self._sampling, self._n, stop)
        metrics = await run_all(*(self._answer(fleet, episode) for episode in episodes))
        graded = await self._rewards.grade([episode.reward_call() for episode in episodes])
        parts = zip(episodes, graded.rewards, graded.infos, metrics, strict=True)
        trajectories = [episode.trajectory(r, {**info, **use}) for episode, r, info, use in parts]
        return Group(task.group_id, tuple(trajectories), task.row)

    async def aclose(self) -> None:
        for tool in self._tools.values():
            await close(tool)

    async def _answer(self, fleet: Generator, episode: Episode) -> dict[str, float]:
        """Complete an answer; return metrics of its calls."""
        calls = right = cut = 0
        seconds, over, clock = 0.0, "", asyncio.get_running_loop().time
        while not episode.ended:
            if calls == self._max_calls:
                over = "calls"
                break
            start, body = self._call(episode.last_text)
            while body is None and not episode.ended:
                await episode.sample(fleet, [self._ends[start]])
                start, body = self._call(episode.last_text)
            if body is None or not episode.left:
                break
            began, calls = clock(), calls + 1
            try:
                async with asyncio.timeout(self._max_seconds - seconds):
                    text, good = await self._run(start, body)
            except TimeoutError:
                over = "seconds"
                break
            finally:
                seconds += clock() - began
            output, complete = self._observation(text)
            right, cut = right + good, cut + (not complete)
            if episode.show(output):
                await episode.sample(fleet, tuple(self._ends))
        if over:
            episode.truncate()
        elif episode.truncated:
            over = "tokens"
        metrics: dict[str, float] = {"calls": calls, "seconds": seconds, "outputs_cut": cut}
        metrics |= {f"over_{budget}": budget == over for budget in ("calls", "seconds", "tokens")}
        metrics |= {"success": right / calls} if calls else {}
        return {f"tools/{name}": float(value) for name, value in metrics.items()}

    def _call(self, text: str) -> tuple[str, str | None]:
        """Return the first start marker and the call after it; None for a call without its end."""
        starts = [start for start in self._ends if start in text]
        start = min(starts, key=lambda each: (text.index(each), -len(each)))
        rest, unfinished = text.partition(start)[2], False
        if self._argument(start) is None:  # JSON, whose texts may hold an end marker
            try:
                blank = len(rest) - len(rest.lstrip())
                return start, rest[: json.JSONDecoder().raw_decode(rest, blank)[1]]
            except json.JSONDecodeError as error:
                unfinished = error.msg.startswith("Unterminated string")
            except (ValueError, RecursionError):  # `_read` reports it
                pass
        body, end, _ = rest.partition(self._ends[start])
        return start, body if end and not unfinished else None

    def _argument(self, start: str) -> str | None:
        """Return the name of a marked tool's only argument, a text; None if calls are JSON."""
        props = self._marked[start].parameters["properties"] if start in self._marked else {}
        return next(iter(props)) if [a.get("type") for a in props.values()] == ["string"] else None

    async def _run(self, start: str, body: str) -> tuple[str, bool]:
        """Return a call's output, and whether it succeeded."""
        try:
            return await toolbox.call(*self._read(start, body)), True
        except SandboxLost:  # not the model's fault: the attempt fails
            raise
        except (Exception, SystemExit) as error:  # of a user's tool
            is_tool_error = isinstance(error, toolbox.ToolError)
            return f"Error: {error if is_tool_error else user_code.words(error)}", False

    def _read(self, start: str, body: str) -> tuple[toolbox.Tool, Mapping[str, Any]]:
        """Return tool and arguments of a call; raise ToolError if they cannot be read."""
        tool = self._marked.get(start)
        if tool and (name := self._argument(start)):
            return tool, {name: body.strip("\n")}
        try:
            value = json.loads(body)
            name, arguments = (tool.name, value) if tool else (value["name"], value["arguments"])
            return self._tools[name], {**arguments}
        except (ValueError, TypeError, KeyError, RecursionError):
            props = tool.parameters["properties"] if tool else {}
            keys = ", ".join(props) if tool else f"name: {' or '.join(self._tools)}, arguments"
            raise toolbox.ToolError(f"a call is a JSON object of {keys}") from None

    def _observation(self, text: str) -> tuple[PromptTokens, bool]:
        """Return the tokens of an output, none special but an image's, and whether it is whole."""
        most, longest = self._max_output, 64 * self._max_output  # characters
        (before, after), images = self._around, self._prompts.images
        if images is None:  # the policy sees none
            text = IN_TEXT.sub("[image]", text)
        elif IN_TEXT.search(text):
            try:
                ids, names = self._with_images(IN_TEXT.split(text), images)
                if len(ids) <= most:
                    return PromptTokens([*before, *ids, *after], names), True
                text = f"Error: an output with an image exceeds max_output_tokens={most}"
            except UserError as error:
                text = f"Error: {error}"
        if long := len(text) > 2 * longest:
            text = f"{text[:longest]}...{text[-longest:]}"
        ids = encode(self._tokenizer, shielded(text, controls(self._tokenizer).strict))
        if len(ids) > most:
            dots, half = encode(self._tokenizer, "..."), most // 2
            long, ids = True, [*ids[: most - half], *dots, *ids[len(ids) - half :]]
        return PromptTokens([*before, *ids, *after]), not long

    def _with_images(
        self, pieces: Sequence[str], images: ImagePrompts
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return the tokens of texts and images in turn, until too many, and the images' names."""
        ids, names = list[int](), tuple[str, ...]()
        for at, piece in enumerate(pieces):
            if len(ids) > self._max_output:
                break
            if at % 2:
                shown, more = images.shown(piece)
                names += more
            else:
                if len(piece) > 128 * self._max_output:
                    raise UserError("the text around an image is too long; give a shorter one")
                shown = shielded(piece, controls(self._tokenizer).strict)
            ids += encode(self._tokenizer, shown)
        return ids, names
