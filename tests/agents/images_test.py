"""Pictures that clients of three APIs send, on their way to the engine and into trajectories."""

import base64

import pytest

from rlx.agents import trajectories
from rlx.rollout.images import ImagePrompts
from rlx.system.image_store import ImageStore, name_of
from tests.fixtures import pictures

pytest.importorskip("PIL")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, once a process
RED, BLUE = pictures.png(1), pictures.png(2)


def uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def shown(data, text="what is it?"):
    picture = {"type": "image_url", "image_url": {"url": uri(data)}}
    return {"role": "user", "content": [picture, {"type": "text", "text": text}]}


@pytest.fixture
def made(tmp_path):
    """(tokenizer) → ImagePrompts with a processor around it."""

    def make(tokenizer):
        pictures.processor(tokenizer).save_pretrained(tmp_path)
        return ImagePrompts(tmp_path, tokenizer, ImageStore(tmp_path / "images"))

    return make


def gateway(agents, made):
    engine = agents.engine(lambda *_: "a thing")
    found = agents.gateway(engine, template=pictures.TEMPLATE, images=made)
    return found


def test_a_conversation_with_pictures_is_one_trajectory_with_their_names(agents, made):
    async def main():
        async with gateway(agents, made) as g, agents.client(g) as client:
            ask = client.chat.completions.create
            messages = [shown(RED)]
            first = await ask(model="m", messages=messages)
            messages += [first.choices[0].message, shown(BLUE, "and that?")]
            await ask(model="m", messages=messages)
            made_of = trajectories.of_run(g.session.interactions, 1.0, "0.0")
            return made_of, g.engine, g.gateway.tokenizer

    (found,), engine, tokenizer = agents.run(main(), 120)  # the first imports much
    assert found.images == (name_of(RED), name_of(BLUE))
    assert engine.images == {name_of(RED): RED, name_of(BLUE): BLUE}
    assert engine.added == 2  # each was sent once, and then named
    mark = tokenizer.convert_tokens_to_ids("<image>")
    assert (found.tokens == mark).sum() == 2 * pictures.EACH
    assert not found.loss_mask[found.tokens == mark].any()
    assert [len(request.images) for request in engine.requests] == [1, 2]


def test_the_same_words_about_another_picture_are_another_prompt(agents, made):
    async def main():
        async with gateway(agents, made) as g, agents.client(g) as client:
            for data in (RED, BLUE):
                messages = [shown(data), {"role": "assistant", "content": "a thing"}]
                messages.append({"role": "user", "content": "sure?"})
                await client.chat.completions.create(model="m", messages=[shown(data)])
                await client.chat.completions.create(model="m", messages=messages)
            return g.session.interactions

    kept = agents.run(main())
    assert [i.parent for i in kept] == [None, 0, None, 2]
    assert [i.images for i in kept] == [(name_of(RED),)] * 2 + [(name_of(BLUE),)] * 2


def test_each_api_takes_pictures(agents, made):
    source = {"type": "base64", "media_type": "image/png", "data": uri(RED).partition(",")[2]}
    block = {"type": "image", "source": source}

    async def main():
        async with gateway(agents, made) as g, agents.client(g) as client, agents.claude(g) as c:
            words = {"type": "text", "text": "what is it?"}
            await c.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": [block, words]}]
            )
            content = [
                {"type": "input_image", "image_url": uri(RED)},
                {"type": "input_text", "text": "what is it?"},
            ]
            await client.responses.create(model="m", input=[{"role": "user", "content": content}])
            await client.chat.completions.create(model="m", messages=[shown(RED)])
            return g.session.interactions

    texts = {(i.prompt_text, i.images) for i in agents.run(main())}
    assert texts == {("<|user|><image>what is it?<|end|><|assistant|>", (name_of(RED),))}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,!!", "base64 is damaged"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        (uri(RED[:-200]), "cannot be read"),
        ("https://example.com/a.png", "data.image_hosts"),
        ("/etc/passwd", "files are not read here"),
        ("image:../../../etc/passwd", "files are not read here"),
    ],
)
def test_a_picture_that_cannot_be_taken_is_a_400(agents, made, url, words):
    async def main():
        import openai

        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        async with gateway(agents, made) as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=[message])
            return error.value, g.engine.requests

    error, requests = agents.run(main())
    assert words in error.message
    assert error.param == "messages"
    assert not requests


def test_a_model_without_a_processor_refuses_pictures(agents):
    async def main():
        import openai

        async with agents.gateway() as g, agents.client(g) as client:
            with pytest.raises(openai.BadRequestError, match="takes no images"):
                await client.chat.completions.create(model="m", messages=[shown(RED)])

    agents.run(main())


def test_a_picture_that_the_server_has_dropped_is_sent_again(agents, made):
    async def main():
        async with gateway(agents, made) as g, agents.client(g) as client:
            await client.chat.completions.create(model="m", messages=[shown(RED)])
            g.engine.images.clear()
            await client.chat.completions.create(model="m", messages=[shown(RED)])
            return g.engine

    engine = agents.run(main())
    assert engine.added == 2
    assert len(engine.requests) == 2
