"""Play environments of OpenEnv servers by the client of `openenv-core`: reset, then steps.

    openenv:URL?KEY=VALUE&…

A key is `size`, `seed`, `turns`, or `action`, the field of an action that gets an answer's text.
Without `action`, an answer is the field of actions that have one text, else JSON by their schema.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.request import urlopen

from rlx.base import RewardParts, UserError, packages_of, unknown
from rlx.cli.user_code import words
from rlx.environments import episodes

SCHEME = "openenv:"
AGENT = f"{__name__}:OpenEnvAgent"
_DEFAULTS = {"size": 0, "seed": 0, "turns": 10, "action": ""}
_OWN = {"done", "reward", "metadata"}  # of each observation and action, besides its content
_SECONDS = 10.0  # for the server's first answer


def rows(text: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield `episodes.rows`; UserError without the package, or if the server does not answer."""
    url, options = episodes.address(SCHEME, text, _DEFAULTS)
    _client()
    try:
        with urlopen(f"{url}/schema", timeout=_SECONDS) as answer:
            form = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        problem = f"{SCHEME}{url} does not answer: {words(error)}"
        raise UserError(f"{problem}; start its server") from error
    _field(form, options["action"])
    yield from episodes.rows(url, text, options, split, form=form)


class OpenEnvAgent:
    """Plays a row's episode; its reward is the sum of the steps' rewards."""

    def __init__(self) -> None:
        self._connect = _client()

    async def run(
        self, data: Mapping[str, Any], base_url: str, api_key: str, http_client: Any, **others: Any
    ) -> RewardParts:
        """Return the reward and the number of steps; UserError if the environment fails."""
        from openai import AsyncOpenAI, BadRequestError

        url, options = episodes.address(SCHEME, data["environment"], _DEFAULTS)
        field, steps = _field(data["form"], options["action"]), 0
        talk, rewards = list[Any](), list[float]()
        form = {"type": "json_schema", "json_schema": {"name": "action", "schema": data["form"]}}
        extra: Any = {} if field else {"response_format": form}
        model = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        try:
            async with self._connect(base_url=url) as environment:
                result = await environment.reset(seed=data["seed"])
                while steps < options["turns"] and not result.done:
                    talk.append({"role": "user", "content": _text(result.observation)})
                    try:
                        answer = await model.chat.completions.create(
                            model="default", messages=talk, **extra
                        )
                    except BadRequestError:  # the conversation is longer than the model's context
                        if steps:
                            break
                        raise
                    reply = answer.choices[0].message.content or ""
                    talk.append({"role": "assistant", "content": reply})
                    if not field and answer.choices[0].finish_reason == "length":
                        break  # half of a JSON text is no action
                    result = await environment.step({field: reply} if field else json.loads(reply))
                    steps += 1
                    if result.reward is not None:
                        rewards.append(float(result.reward))
        except (RuntimeError, ConnectionError, TimeoutError) as error:  # the client's own
            raise UserError(f"{SCHEME}{url} failed after {steps} steps: {words(error)}") from error
        if result.done and not rewards:
            raise UserError(f"{SCHEME}{url} ended an episode without a reward, or with NaN")
        return RewardParts(sum(rewards), {"steps": float(steps)})


def _field(form: Mapping[str, Any], choice: str) -> str:
    """Return the field of actions that gets an answer's text; "": an answer is the whole action."""
    fields = {k: v for k, v in form.get("properties", {}).items() if k not in _OWN}
    if choice and choice not in fields:
        raise unknown("field of the environment's actions", choice, fields)
    texts = [name for name, value in fields.items() if value.get("type") == "string"]
    return choice or (texts[0] if len(texts) == len(fields) == 1 else "")


def _text(observation: Mapping[str, Any]) -> str:
    """Return an observation for the model: its only text, else JSON."""
    content = {key: value for key, value in observation.items() if key not in _OWN}
    only = next(iter(content.values()), "")
    return only if len(content) < 2 and isinstance(only, str) else json.dumps(content)


def _client() -> Any:
    """Return the package's client; UserError without the package."""
    with packages_of("openenv", "environments of OpenEnv need packages"):
        from openenv.core import GenericEnvClient
    return GenericEnvClient
