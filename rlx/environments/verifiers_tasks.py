"""Run environments of the package `verifiers`: rows of their tasks, and episodes as an agent.

    verifiers:ENV?KEY=VALUE&…

`ENV` is an installed package that exports a taskset, as the package's own commands name it. A key
is one of the environment's config (`taskset.split`, `agent.max_turns`), or `size`.
"""

import functools
import importlib.util
import itertools
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from rlx.base import RewardParts, UserError, packages_of
from rlx.cli import user_code
from rlx.environments.reasoning_tasks import SIZES, in_split, setting

SCHEME = "verifiers:"
AGENT = f"{__name__}:VerifiersAgent"
_NAMES = {"idx", "id", "name"}  # what says nothing of a task
_PLACE = re.compile(r'File (".+", line \d+)')


def rows(text: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a split, 1 task in 5 being held out by a hash of its content."""
    environment, _, size = _environment(text)
    size = size or (None if environment.taskset.bounded else SIZES[split == "train"])
    # Tasks without an end may be few that repeat, all of them in one split.
    tasks = (task.data for task in itertools.islice(environment.taskset, size and 20 * size))
    chosen = (t for t in tasks if in_split(t.model_dump_json(exclude=_NAMES), split))
    for data in itertools.islice(chosen, size):
        question = data.prompt_text or data.name or f"task {data.idx}"
        row = {"question": question, "answer": str(getattr(data, "answer", ""))}
        yield {**row, "environment": text, "task": data.model_dump(mode="json", exclude_none=True)}


class VerifiersAgent:
    """Plays a row's task by the environment's own loop, tools and rewards."""

    def __init__(self) -> None:
        _loaders()  # imports the package, in seconds, before the first run

    async def run(self, data: Mapping[str, Any], base_url: str, **others: Any) -> RewardParts:
        """Return the trained role's reward, with each reward and metric of the environment."""
        environment, role, _ = _environment(name := data["environment"])
        from verifiers.v1 import EvalClientConfig, ModelContext

        kind = type(environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(data["task"]), environment.config.taskset.task)
        # The key of the run is in its base_url.
        client = EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        # Serving for one episode: what serves keeps a client for each base_url until it ends.
        async with environment.serving():
            episode = await environment.run_episode(task, ModelContext("default", client))
        for failed in (*episode.traces, episode):
            if not failed.ok and failed.errors:
                raise UserError(_failure(name, failed.errors[-1]))
        played = [trace for trace in episode.traces if trace.agent.name == role]
        if len(played) != 1:
            raise UserError(f"{SCHEME}{name} lets {role} play {len(played)} times; it must be once")
        # A reward has no score if the environment's time for it was over.
        scores = {f"reward/{k}": v.score if v else math.nan for k, v in played[0].rewards.items()}
        metrics = {k: v for k, v in played[0].metrics.items() if v is not None}
        return RewardParts(played[0].reward, scores | metrics)


def _environment(text: str) -> tuple[Any, str, int | None]:
    """Return a new environment, its trained role, and the wanted number of rows; or UserError."""
    loaders = _loaders()
    from verifiers.v1 import AgentConfig, PrimeConfig

    name, _, query = text.partition("?")
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if not module.isidentifier():
        raise UserError(f"{SCHEME}{name} names no environment; write {SCHEME}NAME of a package")
    if not importlib.util.find_spec(f"verifiers.v1.tasksets.{module}"):
        user_code.load(module)  # or names one that is near
    try:
        settings = _settings(query)
        size = settings.pop("size", None)
        config_class = loaders.env_config_type(name, settings.get("id", ""))
        settings["taskset"] = {**settings.get("taskset", {}), "id": name}
        fields = {role: field.default for role, field in config_class.model_fields.items()}
        roles = {role: d for role, d in fields.items() if isinstance(d, AgentConfig)}
        for role, default in roles.items():
            part = settings.setdefault(role, {})
            if isinstance(default.runtime, PrimeConfig):  # the package's default, a paid service
                part.setdefault("runtime", {"type": "subprocess"})
            if default.harness is None and loaders.default_harness_id(name) == "bash":
                part.setdefault("harness", {"id": "null"})  # not a shell with the user's rights
        environment = loaders.load_environment(config_class.model_validate(settings))
    except Exception as error:
        raise UserError(f"{SCHEME}{text} cannot be made: {user_code.where(error)}") from error
    trained = [role for role in roles if getattr(environment.config, role).client is None]
    if len(trained) != 1:
        raise UserError(
            f"{SCHEME}{text} has the roles {', '.join(roles)}, and one can be trained; give the "
            "others a server, as ?ROLE.client.type=eval&ROLE.client.base_url=URL&ROLE.model=NAME"
        )
    return environment, trained[0], size


@functools.cache
def _loaders() -> Any:
    """Return the package's module that finds environments; UserError without the package."""
    with packages_of("verifiers", "environments of verifiers need packages"):
        from verifiers.v1.utils import loaders
    logging.getLogger("verifiers").setLevel(logging.CRITICAL)  # its errors are ours
    # The package's chat program is installed by `uv`, which stands next to this interpreter.
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{Path(sys.executable).parent}"
    return loaders


def _settings(query: str) -> dict[str, Any]:
    """Return the mappings that `a.b=1&c=2` spells."""
    settings: dict[str, Any] = {}
    for key, value in parse_qsl(query):
        *sections, last = key.split(".")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
        section[last] = setting(value)
    return settings


def _failure(text: str, error: Any) -> str:
    """Return an episode's error in one line, with the line that raised it."""
    places = _PLACE.findall(error.traceback or "")
    lines = [p for p in places if not any(part in p for part in user_code.LIBRARIES)]
    at = f" ({lines[-1].replace(chr(34), '')})" if lines else ""
    return f"{SCHEME}{text}: {error.type}: {' '.join(error.message.split())[:300]}{at}"
