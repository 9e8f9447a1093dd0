"""Keep outside text that spells `<|im_end|>` from becoming control tokens of a prompt.

`shielded` puts CUT into such spellings before the chat template is rendered, and `workflows.encode`
splits the rendered text there. Only the template's own markers stay intact.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

Decode = Callable[[Sequence[int], bool], str]  # (token ids, whether to show special tokens) → text
CUT = "\ufdd0"  # a Unicode noncharacter; it is removed before tokenisation
RAW = "{% for m in messages %}{{ m.content }}{% endfor %}"  # rows write their markers themselves
_TAG = re.compile(r"</?\w+>")


class Own(str):
    """A text that the model wrote, whose markers are control tokens."""

    __slots__ = ()


class Controls(NamedTuple):
    """Control tokens: the special ones, and the added ones that the chat template writes."""

    ids: frozenset[int]  # without tags such as <think>, which prompts spell on purpose
    pattern: re.Pattern[str]  # matches the first character of each spelling of `ids`
    strict: re.Pattern[str]  # matches tags too, for the outputs of tools


def controls(tokenizer: Any) -> Controls:
    """Return the control tokens of a tokenizer with its chat template."""
    return _controls(tokenizer, str(getattr(tokenizer, "chat_template", "")))


def shielded(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return a JSON value with CUT inserted wherever its texts match a pattern of `Controls`."""
    if type(value) is str:
        return pattern.sub(rf"\g<0>{CUT}", value)
    if isinstance(value, Mapping):
        return {shielded(k, pattern): shielded(v, pattern) for k, v in value.items()}
    return [shielded(v, pattern) for v in value] if isinstance(value, list | tuple) else value


def own_text(ids: Iterable[int], decode: Decode, control: Controls) -> str:
    """Return the text of a model's tokens, shielded where ordinary ones spell a control token."""
    runs = [(real, list(run)) for real, run in groupby(ids, control.ids.__contains__)]
    text = decode([i for _, run in runs for i in run], True)
    if shielded(text, control.pattern).count(CUT) == sum(len(run) for real, run in runs if real):
        return text
    texts = [(real, decode(run, True)) for real, run in runs]
    return "".join(text if real else shielded(text, control.pattern) for real, text in texts)


def plain(text: str) -> str:
    """Return a text without CUT."""
    return text.replace(CUT, "")


@lru_cache(8)
def _controls(tokenizer: Any, template: str) -> Controls:
    added = {i: (t.content, t.special) for i, t in tokenizer.added_tokens_decoder.items()}
    every = {i: s for i, (s, special) in added.items() if special or (s.strip() and s in template)}
    texts = {i: s for i, s in every.items() if added[i][1] or not _TAG.fullmatch(s)}
    texts = {} if template.endswith(RAW) else texts  # there every marker is the row's own
    return Controls(frozenset(texts), _starts(texts.values()), _starts(every.values()))


def _starts(texts: Iterable[str]) -> re.Pattern[str]:
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text[1:]:
            rests.setdefault(text[0], []).append(re.escape(text[1:]))
    parts = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(parts) or "(?!)")
