"""GRPO of the agent of arithmetic_agent.py, as written with OpenAI's Agents SDK.

Command:   python -m rlx.main --config=configs/arithmetic_agents_sdk.py
Hardware:  two CPU cores, no network; the extra `agents`, and `pip install openai-agents`.
Expect:    two steps like arithmetic_agent.py's, which its calls equal; no whole run was made.
"""

from configs import arithmetic_agent


def get_config():
    """The run described above."""
    c = arithmetic_agent.get_config()
    c.rollout.workflow = str(arithmetic_agent.AGENT.with_name("agents_sdk.py:SecondTry"))
    return c
