"""A real asyncio Engine that answers by a script: what it says is a function of the prompt's text.

    reply(prompt text, seed, sample index) → text; then the end token, if the budget has room

One token a byte, so that every character can be watched on its way through the fleet. Stop strings
end it as a model's engine would. Without a script it repeats what the last user said.
"""

import asyncio
import re

from rlx.engines.engine import MissingImage
from rlx.fleet.requests import Chunk, EngineStatus

TEMPLATE = (
    "{% if tools %}<|system|>tools <tool_call>: {{ tools | map(attribute='function') "
    "| map(attribute='name') | join(' ') }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """One token a byte and five specials, with a chat template that knows tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    found.add_special_tokens(
        {"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]}
    )
    found.chat_template = template
    return found


def repeat(prompt, seed, index):
    """What the last user said."""
    return re.findall(r"<\|user\|>(.*?)<\|end\|>", prompt, re.DOTALL)[-1]


class ScriptedEngine:
    """`together`: how many requests must be there before the first is answered."""

    def __init__(self, reply=repeat, *, max_model_len=4096, step_seconds=0.0, together=0):
        self.tokenizer, self.reply = make_tokenizer(), reply
        self.max_model_len, self.step_seconds, self.together = max_model_len, step_seconds, together
        self.room = max_model_len  # tokens of a prompt; unlike max_model_len no status has it
        self.slots = 512
        self._met = asyncio.Event()
        self.decode_steps = 3
        self.version = 0
        self.requests, self.aborted, self.running = [], 0, 0
        self.images, self.added = {}, 0  # by name; how often one was added

    def gather(self, together):
        """From now on, so many requests must be there before one is answered, once."""
        self.together = together
        self._met.clear()

    async def start(self):
        pass

    async def close(self):
        pass

    async def pause(self, level=0):
        pass

    async def resume(self):
        pass

    async def load(self, path, version, kv="keep"):
        self.version = version
        return 0

    async def score(self, request):
        raise NotImplementedError

    def status(self):
        return EngineStatus(self.version, self.running, 0, self.slots, self.max_model_len, 0, False)

    async def add_image(self, name, data):
        self.images[name], self.added = data, self.added + 1

    async def generate(self, request):
        if missing := set(request.images) - self.images.keys():
            raise MissingImage(f"image {min(missing)} is not here")
        if len(request.prompt_tokens) >= min(self.room, self.max_model_len):
            raise ValueError(
                f"the prompt has {len(request.prompt_tokens)} tokens, max_model_len is "
                f"{min(self.room, self.max_model_len)}; shorten it"
            )
        self.requests.append(request)
        s, live = request.sampling, {}
        prompt = self.tokenizer.decode(request.prompt_tokens.tolist())
        for index in range(request.first_index, request.first_index + request.n):
            text = self.reply(prompt, s.seed, index)
            stops = [k for k in range(len(text) + 1) if text[:k].endswith(s.stop)]
            stops = [k for k in stops if len(text[:k].encode()) >= s.min_new_tokens]
            text = text[: min(stops)] if stops else text
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += [] if stops else [self.tokenizer.eos_token_id]
            live[index] = (ids[: s.max_new_tokens], len(ids) > s.max_new_tokens)
        at = dict.fromkeys(live, 0)
        self.running += request.n
        if self.running >= self.together:
            self._met.set()
        try:
            await self._met.wait()
            while at:
                await asyncio.sleep(self.step_seconds)
                for index in list(at):
                    ids, cut = live[index]
                    k = at[index]
                    new = ids[k : k + self.decode_steps]
                    at[index] += len(new)
                    over = at[index] >= len(ids)
                    reason = ("length" if cut else "stop") if over else None
                    if over:
                        del at[index]
                    logs = [-0.5 - 0.001 * (k + i) for i in range(len(new))]
                    tops = [[i, p] for i, p in zip(new, logs, strict=True)]
                    likely = [pair for top in tops for pair in [top, [0, -1.0], [1, -2.0]]]
                    likely = likely if s.top_logprobs else []
                    yield Chunk(
                        index, new, logs, [self.version] * len(new), reason,
                        [i for i, _ in likely], [p for _, p in likely],
                    )  # fmt: skip
        finally:
            self.aborted += len(at)
            self.running -= request.n
