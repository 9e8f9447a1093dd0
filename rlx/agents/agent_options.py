"""The options of agents' processes and rewards, which a config declares."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.base import UserError
from rlx.option import option, read_options
from rlx.workers.worker_process import NO_LIMITS, StartWorker, WorkerLimits, start_worker

if TYPE_CHECKING:
    from rlx.fleet.tls import Tls

EXPORTS = ("tree", "concat", "individual")  # see trajectories.py


@dataclass(frozen=True, slots=True)
class AgentOptions:
    turn_discount: float = option(1.0, "share of the next turn's return that counts", "[0, 1]")
    export: str = option("tree", "rows of a run: docs/agents.md", EXPORTS)
    reward_seconds: float = option(0.0, "wait for the reward of a run that returned None", "0")
    block_seconds: float = option(300.0, "most time an agent may block its event loop", "(0, inf)")
    process_per_run: bool = option(False, "a process for each run, which hides its key from others")
    system_prompt: str = ""  # system_prompt, question_key: of rows that have no `messages`
    question_key: str = "question"
    workers: int = 1  # processes; one serves many runs as long as they wait rather than compute
    limits: WorkerLimits = NO_LIMITS  # of each process
    start: StartWorker = start_worker  # starts one, here or elsewhere
    host: str = "127.0.0.1"  # host, tls: of the gateway that they ask
    tls: "Tls | None" = None

    @classmethod
    def of(cls, config: Any) -> "AgentOptions":
        """Return those of a run's config; UserError where other nodes could not ask its gateway."""
        from rlx.fleet.tls import server_tls  # imports gRPC, which rlx.config does not need

        agents, online = config.agents, config.online
        tls = server_tls(online.tls_cert, online.tls_key, "") if agents.resources else None
        if agents.resources and not tls:
            raise UserError(
                f"agents.resources={agents.resources} puts agents on other nodes, which ask the "
                "gateway by TLS; set online.host, tls_cert and tls_key, or scheduler.type=ray"
            )
        return read_options(
            cls, config.data, agents, workers=config.reward.workers, tls=tls,
            limits=WorkerLimits.of(agents, config.sandbox),
            host=online.host if tls else DEFAULTS.host,
        )  # fmt: skip


DEFAULTS = AgentOptions()
