"""Workers on a Ray cluster: what is refused without one. tests/run/on_ray_test.py has one."""

import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.base import UserError
from rlx.config import default
from rlx.launch import ray_workers
from rlx.workers.worker_process import start_worker


def test_without_resources_workers_are_on_this_machine():
    assert ray_workers.starter("reward", default()) is start_worker


@pytest.mark.parametrize("resources", ["CPU", "CPU:one", "CPU:1:2", "CPU:-1", "GPU:nan"])
def test_resources_that_ray_cannot_count_are_refused(resources):
    config = default()
    config.reward.resources = resources
    with pytest.raises(UserError, match=rf"reward.resources={resources}: give Ray resources"):
        ray_workers.starter("reward", config)


def test_agents_on_other_nodes_ask_a_gateway_with_tls_where_it_listens():
    config = default()
    config.agents.resources = "CPU:1"
    with pytest.raises(UserError, match=r"agents.resources=CPU:1 .* set online.host, tls_cert"):
        AgentOptions.of(config)
    config.online.host, config.online.tls_cert, config.online.tls_key = "10.0.0.1", "c", "k"
    options = AgentOptions.of(config)
    assert (options.host, options.tls.cert) == ("10.0.0.1", "c")
    config.agents.resources = ""
    options = AgentOptions.of(config)
    assert (options.host, options.tls) == ("127.0.0.1", None)
