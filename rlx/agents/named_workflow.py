"""Builds the workflow that a config or a command line names: one of rlx, or agents' runs."""

import inspect
from collections.abc import Mapping
from typing import Any

from rlx.agents import loading
from rlx.agents.workflow import AgentOptions, AgentWorkflow
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.workflows import RLVR, Prompts, Workflow

RLVR_NAME = "rlvr"
_WORKFLOWS = {RLVR_NAME: RLVR}


def uses_rewards(name: str, key: str = "workflow") -> bool:
    """Return whether the workflow has its trajectories graded by a reward pool.

    Args:
      name: of `_WORKFLOWS`, or of a class: `path/to/file.py:Class` or `package.module:Class`.
      key: of the config, or the flag, that has the name.

    Raises:
      UserError: no such class, or it is neither an agent nor a workflow.
    """
    cls = loading.load_class(name, key, _WORKFLOWS)
    return loading.kind(cls) == "workflow" and "reward_pool" in inspect.signature(cls).parameters


def build(
    name: str,
    kwargs: Mapping[str, Any],
    prompts: Prompts,
    sampling: Sampling,
    n: int,
    reward_pool: RewardPool,
    agents: AgentOptions,
) -> Workflow:
    """Build a workflow of rlx, or one that runs an agent class.

    Args:
      name: as in `uses_rewards`.
      kwargs: of the constructor, from the user. That of a workflow gets `prompts`, `tokenizer`,
        `sampling`, `n` and `reward_pool` too, as far as it names them.

    Raises:
      UserError: as `uses_rewards`, or the class does not take the arguments.
    """
    cls = loading.load_class(name, table=_WORKFLOWS)
    if loading.kind(cls) == "agent":
        return AgentWorkflow(name, prompts.tokenizer, sampling, n, kwargs=kwargs, options=agents)
    shared = {
        "prompts": prompts, "tokenizer": prompts.tokenizer, "sampling": sampling, "n": n,
        "reward_pool": reward_pool,
    }  # fmt: skip
    takes = inspect.signature(cls).parameters
    given = {key: value for key, value in shared.items() if key in takes}
    return loading.instance(cls, {**given, **kwargs})
