"""Build the workflow or agent that a config or a command line names."""

import inspect
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from rlx.agents import loading
from rlx.agents.agent_options import DEFAULTS, AgentOptions
from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.cli import user_code
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import workflow_checks
from rlx.rollout.episode import MultiTurn
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import RLVR, Prompts, Workflow, encode
from rlx.sandbox.sandbox import SandboxOptions

RLVR_NAME = "rlvr"
ONLINE = "online"  # trains on applications' sessions; held-out questions are RLVR
_WORKFLOWS = {RLVR_NAME: RLVR, ONLINE: RLVR, "tools": ToolUse, "multi_turn": MultiTurn}
_GIVEN = ("prompts", "tokenizer", "sampling", "n", "reward_pool", "sandbox")


def uses_rewards(name: str, key: str = "workflow") -> bool:
    """Return whether the workflow `name` takes a reward pool; raise UserError naming `key`."""
    cls = loading.load_class(name, key, _WORKFLOWS)
    return loading.kind(cls) == "workflow" and "reward_pool" in inspect.signature(cls).parameters


@dataclass(frozen=True)
class NamedWorkflow:
    """A workflow or agent class by name, with its arguments."""

    name: str  # `rlvr`, another key of the table, FILE.py:Class or module:Class
    kwargs: Mapping[str, Any]  # the user's arguments of the constructor
    # Of the run; a workflow's constructor gets the parts in `_GIVEN` that it names.
    prompts: Prompts
    sampling: Sampling
    n: int
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)

    def build(self, reward_pool: RewardPool, agents: AgentOptions = DEFAULTS) -> Workflow:
        """Return the workflow, or an AgentWorkflow for an agent; raise UserError if it fails."""
        cls, tokenizer = loading.load_class(self.name, table=_WORKFLOWS), self.prompts.tokenizer
        if loading.kind(cls) == "agent":
            shared = (tokenizer, self.sampling, self.n)
            keywords: Any = {"kwargs": self.kwargs, "images": self.prompts.images}
            return AgentWorkflow(self.name, *shared, **keywords, options=agents)
        if cls is MultiTurn and not reward_pool.weights:  # it would call every answer wrong
            problem = f"rollout.workflow={self.name} asks again before models and judges grade"
            raise UserError(f"{problem}; name a function that says what is right in reward.terms")
        values = {**vars(self), "tokenizer": tokenizer, "reward_pool": reward_pool}
        takes = inspect.signature(cls).parameters
        args = {key: values[key] for key in _GIVEN if key in takes}
        return loading.instance(cls, {**args, **self.kwargs})

    def try_out(self, row: Mapping[str, Any]) -> None:
        """Run a user's own workflow once, without a server and with rewards of 0; or UserError."""
        if user_code.is_own(self.name) and loading.kind(loading.load_class(self.name)) != "agent":
            with closing(RewardPool({})) as pool:
                token = encode(self.prompts.tokenizer, "1")[0]
                workflow_checks.dry_run(self.build(pool), row, self.name, token)
