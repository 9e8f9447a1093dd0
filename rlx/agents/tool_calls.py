"""Tool calls in a completion's text, in the format of Hermes and Qwen. Pure.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

(https://github.com/NousResearch/Hermes-Function-Calling)
"""

import json
import re
from collections.abc import Callable
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALLS = re.compile(f"{OPEN}(.*?){CLOSE}", re.DOTALL)


def known(template: str) -> bool:
    """Return whether a chat template describes tools in this format."""
    return "tools" in template and OPEN in template


def beginning(name: str) -> str:
    """Return the text that a call begins with, of the tool `name`, of any where it is ""."""
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments":' if name else f"{OPEN}\n"


def split(text: str, new_id: Callable[[], str]) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the words before the calls, and the calls as OpenAI has them.

    A text whose calls are not all well-formed and closed is returned as words alone: the agent
    then judges what the model meant.

    Args:
      new_id: makes an id for each call.

    Returns:
      (None where there are calls and only blanks before them, calls).
    """
    start = text.find(OPEN)
    if start < 0:
        return text, []
    bodies = _CALLS.findall(text, start)
    if _CALLS.sub("", text[start:]).find(OPEN) >= 0:
        return text, []
    calls = []
    for body in bodies:
        found = _read(body)
        if found is None:
            return text, []
        name, arguments = found
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": new_id(), "type": "function", "function": function})
    before = text[:start]
    return (before if before.strip() else None), calls


def _read(body: str) -> tuple[str, dict[str, Any]] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return (found["name"], arguments) if isinstance(arguments, dict) else None
