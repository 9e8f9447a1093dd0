"""GRPO of the agent of arithmetic_agent.py, written with LangChain.

Command:   python -m rlx.main --config=configs/arithmetic_langchain.py
Hardware:  two CPU cores, no network; the extra `agents`, and `pip install langchain-openai`.
Time:      not run to the end.
Expect:    not run to the end; two steps equal those of arithmetic_agent.py.
"""

from configs import arithmetic_agent


def get_config():
    """The run described above."""
    c = arithmetic_agent.get_config()
    c.rollout.workflow = str(arithmetic_agent.AGENT.with_name("langchain.py:SecondTry"))
    return c
