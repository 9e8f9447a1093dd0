"""Play games of `textarena` for one player, as Wordle-v0 or GuessTheNumber-v0.

    textarena:GAME?KEY=VALUE&…

A key is `size`, `seed`, or `turns`. An episode ends with the reward 0 after this number of
answers, and also when it is longer than the model's context.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rlx.base import RewardParts, UserError, nearest, packages_of
from rlx.cli.user_code import words
from rlx.environments import episodes

SCHEME = "textarena:"
AGENT = f"{__name__}:TextArenaAgent"
_DEFAULTS = {"size": 0, "seed": 0, "turns": 50}


def rows(text: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield `episodes.rows`; UserError without the package, or for a game that cannot be played."""
    game, options = episodes.address(SCHEME, text, _DEFAULTS)
    _begin(game, options["seed"])
    yield from episodes.rows(game, text, options, split)


class TextArenaAgent:
    """Plays a row's episode; its reward is the game's."""

    async def run(
        self, data: Mapping[str, Any], base_url: str, api_key: str, http_client: Any, **others: Any
    ) -> RewardParts:
        """Return the reward and the number of turns; UserError if the game fails."""
        from openai import AsyncOpenAI, BadRequestError

        game, options = episodes.address(SCHEME, data["environment"], _DEFAULTS)
        model = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        played, talk, done, turns = _begin(game, data["seed"]), list[Any](), False, 0
        while turns < options["turns"] and not done:
            news = [text for player, text, _ in played.get_observation()[1] if player < 0]
            talk.append({"role": "user", "content": "\n".join(news)})
            try:
                answer = await model.chat.completions.create(model="default", messages=talk)
            except BadRequestError:  # the conversation has become longer than the model's context
                if turns:
                    break
                raise
            talk.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            try:
                done, turns = played.step(talk[-1]["content"])[0], turns + 1
            except Exception as error:
                raise UserError(f"{SCHEME}{game} failed in turn {turns}: {words(error)}") from error
        return RewardParts(played.close()[0][0] if done else 0.0, {"turns": float(turns)})


def _begin(game: str, seed: int) -> Any:
    """Return a game at its beginning."""
    with packages_of("textarena", f"{SCHEME}{game} needs packages"):
        import textarena
    games = textarena.envs.registration.ENV_REGISTRY
    if f"{game}-raw" not in games:
        near = nearest(game, [name.removesuffix("-raw") for name in games if "-raw" in name])
        raise UserError(f"textarena has no game {game!r}; did you mean {near!r}?")
    try:
        played = textarena.make(f"{game}-raw")  # raw: each time only the news
        played.reset(num_players=1, seed=seed)
    except Exception as error:  # some games need a network, or assert the number of players
        raise UserError(f"{SCHEME}{game} does not begin with one player: {words(error)}") from error
    return played
