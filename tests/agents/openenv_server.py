"""A server of OpenEnv on a free port, which it prints: sums with a second try, and failures."""

import math
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """An answer."""

    word: str


class Seen(Observation):
    """An observation, which becomes a message to the model."""

    text: str


class Sums(Environment):
    """Asks for seed % 10 + 1; `raise` and `nan` make it fail."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **others):
        self._wanted = str(seed % 10 + 1)
        return Seen(text=f"Compute {seed % 10} + 1.")

    def step(self, action, timeout_s=None, **others):
        if action.word == "raise":
            raise ValueError("the board is broken")
        if action.word == "nan":
            return Seen(text="", reward=math.nan, done=True)
        right = action.word == self._wanted
        return Seen(text="Once more.", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    own = socket.create_server(("127.0.0.1", 0))
    print(own.getsockname()[1], flush=True)
    app = create_fastapi_app(Sums, Guess, Seen, max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[own])
