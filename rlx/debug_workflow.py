"""`python -m rlx.debug_workflow --workflow=agent.py:Agent --base_url=http://127.0.0.1:8000/v1`.

Looks at the server, one run and many runs at once. Exit status 0 without a problem, 1 with one.
"""

import json
import os
import sys
from pathlib import Path

from rlx.agents import agent_options, loading, workflow
from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures
from rlx.run import flags
from rlx.system.jsonl import jsonable, write_atomically

FLAGS = {
    "workflow": "the agent: FILE.py:Class or module:Class; default: rollout.workflow of --config",
    "workflow_kwargs": "arguments of the class, as JSON; default: rollout.workflow_kwargs",
    "base_url": "of the server, as a client takes it: http://127.0.0.1:8000/v1",
    "api_key": "of the server; default: the variable OPENAI_API_KEY",
    "model": "of the server, put in every call of the agent; default: what the agent asks for",
    "data": "rows.jsonl; default: data.train of --config, or one question",
    "rows": "of the data, from 0: 7, 7:20 or 7:; default: all. One run takes the first",
    "batch": "rows at once; default: rollout.batch_prompts of --config, or 32",
    "group": "runs of each row; default: sampling.n_samples of --config, or 8",
    "timeout": "seconds of a run, 0 for none; default 300",
    "steps": "1 (one run), 2 (many at once); default 1,2",
    "output": "where the report goes, FILE.json; default: nowhere",
}


def main() -> int:
    """Run the debugger as the flags say, write its report, and return the exit status."""
    config, values = flags.parse(sys.argv, config_needed=False, switches={}, **FLAGS)
    agent, kwargs = loading.workflow_of(values, config.rollout if config else values)
    if ":" not in agent or not values.base_url:
        raise UserError("give --workflow=FILE.py:CLASS and --base_url=http://HOST:PORT/v1")
    loading.check_agent(agent, kwargs)
    workflow.gateway_class()  # raises where the extra is not installed
    from rlx.debugger import debugger

    rows = debugger.load_rows(values.data, values.rows, config)
    batch = flags.number(values, "batch", int, config.rollout.batch_prompts if config else 32)
    group = flags.number(values, "group", int, config.sampling.n_samples if config else 8)
    steps = debugger.steps(values.steps or "1,2", rows, batch, group)
    key = values.api_key or os.environ.get("OPENAI_API_KEY", "")
    server = debugger.Forwarder(values.base_url, key, values.model)
    options = agent_options.AgentOptions.of(config) if config else None
    timeout = flags.number(values, "timeout", float, 300.0)
    report = debugger.Debugger(agent, kwargs, options, server, timeout).run(steps)
    if values.output:
        write_atomically(Path(values.output), json.dumps(jsonable(report), indent=1).encode())
    command.say(f"\nthen: python -m rlx.evaluate --config=FILE --workflow={agent}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
