"""Simulated users of an application: they ask the embedded task's problems and rate the answers.

The application knows only a base_url, and an api_key per user. `RLX_ADMIN_KEY` is the run's. The
program ends with the run.

    python experiments/2026-11-online/users.py [--base-url=…] [--users=48]
"""

import argparse
import asyncio
import itertools
import os

import aiohttp
import openai

from rlx.rollout import arithmetic

RATED = 0.5  # seconds until a user asks again when all places are taken


async def play(client: openai.AsyncOpenAI, problems: list[dict]) -> int:
    """Ask problems, one per episode, until the run ends; return the number of right answers."""
    right = 0
    for problem in problems:
        messages = [{"role": "user", "content": problem["question"]}]
        got = await client.chat.completions.create(model="default", messages=messages)
        words = got.choices[0].message.content or ""
        thumb = f"\\boxed{{{problem['answer']}}}" in words
        right += thumb
        body = {"reward": float(thumb), "completion_id": got.id}
        await client.post("/rewards", body=body, cast_to=object)
        while True:  # the next episode, under the same key
            try:
                await client.post("/session/refresh", cast_to=object)
                break
            except openai.RateLimitError:  # more sessions than training has a place for
                await asyncio.sleep(RATED)
    return right


async def main(base_url: str, users: int, seed: int) -> None:
    """Open a session for each user, and let all of them ask until the run ends."""
    admin = {"Authorization": f"Bearer {os.environ['RLX_ADMIN_KEY']}"}
    stream = arithmetic.stream(seed, "train")
    async with aiohttp.ClientSession(headers=admin) as http:

        async def user() -> None:
            while True:
                try:
                    async with http.post(f"{base_url}/sessions", json={}) as made:
                        if made.status == 201:
                            key = (await made.json())["api_key"]
                            break
                except aiohttp.ClientConnectionError:
                    pass  # the run has not begun
                await asyncio.sleep(RATED)
            async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2) as client:
                for _ in itertools.count():
                    await play(client, list(itertools.islice(stream, 1)))

        together = asyncio.gather(*(user() for _ in range(users)), return_exceptions=False)
        try:
            await together
        except openai.APIConnectionError:
            print("the run is over")


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--base-url", default="http://127.0.0.1:8123/v1")
    p.add_argument("--users", type=int, default=48)
    p.add_argument("--seed", type=int, default=7)
    a = p.parse_args()
    asyncio.run(main(a.base_url, a.users, a.seed))
