"""A fleet whose model is a function from the text so far to its continuation."""

import numpy as np

from rlx.fleet.sample import Completion


class Scripted:
    """Continues as `model(prompt, index)` says, to a stop string or its budget, a token a byte.

    Each request is answered by the next version. A continuation that does not end in `<|end|>`
    goes on for ever.
    """

    def __init__(self, tokenizer, model):
        self.tokenizer, self.model, self.calls, self.version = tokenizer, model, [], 0

    async def generate(self, prompt_tokens, sampling, n, *, priority=0):
        self.calls.append((list(map(int, prompt_tokens)), sampling, n, priority))
        self.version += 1
        prompt = self.tokenizer.decode(list(prompt_tokens))
        return [self._completion(self.model(prompt, i), sampling) for i in range(n)]

    def _completion(self, text, sampling):
        ids = self.tokenizer(text)["input_ids"]
        for count in range(1, len(ids) + 1):
            so_far = self.tokenizer.decode(ids[:count])
            if any(stop in so_far for stop in sampling.stop):
                ids, reason = ids[:count], "stop"
                break
        else:
            reason = "stop" if text.endswith("<|end|>") else "length"
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], "length"
        return Completion(
            tokens=np.array(ids, np.int32),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), self.version, np.int32),
            stop_reason=reason,
        )
