"""Images in rows: their forms, what is refused, and prompts as the model's processor makes them."""

import asyncio
import base64
import json
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.journal import records
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import data
from rlx.rollout.datasets import answered_tokens
from rlx.rollout.images import ImagePrompts, RowImages, data_uri, image_part
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Prompts, Task, joined
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system import image_store
from rlx.system.image_store import ImageStore, name_of
from tests.fixtures import pictures
from tests.rollout.scripted import Scripted

pytest.importorskip("PIL")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, once a process
RED, BLUE = pictures.png(1), pictures.png(2)


def uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    found.chat_template = pictures.TEMPLATE
    return found


@pytest.fixture(scope="module")
def processor(tokenizer):
    return pictures.processor(tokenizer)


@pytest.fixture
def prompts(processor, tokenizer, tmp_path):
    processor.save_pretrained(tmp_path / "model")
    store = ImageStore(tmp_path / "images")
    return Prompts(tokenizer, images=ImagePrompts(tmp_path / "model", tokenizer, store))


def loaded(path, rows, prompts=None, **options):
    path.write_text("\n".join(map(json.dumps, rows)))
    store = prompts.images.store if prompts else ImageStore()
    return data.load(str(path), images=RowImages(store, "images", **options))


def test_every_form_of_an_image_gives_the_same_prompt(prompts, tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    text = {"type": "text", "text": "what?"}
    forms = [
        {"type": "image"},
        {"type": "image", "image": "red.png"},
        {"type": "image", "image": uri(RED)},
        {"type": "image_url", "image_url": {"url": uri(RED)}},
        {"type": "input_image", "image_url": uri(RED)},
        {"type": "image", "source": {"type": "base64", "data": uri(RED).partition(",")[2]}},
    ]
    rows = [{"question": [{"role": "user", "content": [f, text]}], "answer": "a"} for f in forms]
    rows[0]["images"] = ["red.png"]  # of the part without a source
    rows += [
        {"question": q, "images": ["red.png"], "answer": "a"} for q in ("what?", "<image>what?")
    ]
    found = [prompts.ids(row) for row in loaded(tmp_path / "rows.jsonl", rows, prompts)]
    assert {ids.images for ids in found} == {(name_of(RED),)}
    assert len({tuple(ids) for ids in found}) == 1


def test_a_prompt_has_the_tokens_of_the_models_own_processor(prompts, processor, tmp_path):
    row = {"question": "a <image> and a <image>: which?", "images": [uri(RED), uri(BLUE)]}
    (row,) = loaded(tmp_path / "rows.jsonl", [{**row, "answer": "a"}], prompts)
    files = [image_store.open_picture(x) for x in (RED, BLUE)]
    want = processor(text=[prompts.text(row)], images=[files])["input_ids"][0]
    assert prompts.ids(row) == want
    assert prompts.ids(row).images == (name_of(RED), name_of(BLUE))


def test_a_users_words_make_no_placeholder(prompts, tokenizer, tmp_path):
    (row,) = loaded(
        tmp_path / "rows.jsonl",
        [{"question": [{"role": "user", "content": [
            {"type": "image", "image": uri(RED)}, {"type": "text", "text": "is <image> a tag?"}]}],
          "answer": "a"}], prompts,
    )  # fmt: skip
    ids = prompts.ids(row)
    assert ids.count(tokenizer.convert_tokens_to_ids("<image>")) == pictures.EACH
    assert tokenizer.decode(ids).count("<image>") == pictures.EACH + 1


def test_a_demonstration_is_trained_on_after_its_image(prompts, tokenizer, tmp_path):
    row = {"question": "what?", "images": [uri(RED)], "answer": "a", "completion": "red"}
    (row,) = loaded(tmp_path / "rows.jsonl", [row], prompts)
    ids, mask, images = answered_tokens(prompts, row, "red", tokenizer.eos_token_id, "the answer")
    assert tokenizer.decode(ids[mask]) == "red<|end|>"
    assert ids[: -mask.sum()].tolist() == prompts.ids(row)
    assert images == (name_of(RED),)


def test_a_trajectory_keeps_its_images_through_the_journal(prompts, tmp_path):
    from rlx.base import Group, PromptTokens
    from rlx.fleet.sample import Completion

    one = np.ones(1, np.int32)
    done = Completion(one, np.zeros(1, np.float32), one, "stop")
    turns = [(PromptTokens([1, 2], ["x"]), done), (PromptTokens([3], ["y"]), done)]
    trajectory = joined(turns, 1.0, "0.0")
    (back,) = records.loads(records.dumps([Group(0, (trajectory,))]))
    assert back.trajectories[0].images == trajectory.images == ("x", "y")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"images": ["none.png"]}, "no image .*none.png; correct the path"),
        ({"images": ["https://example.com/a.png"]}, "data.image_hosts does not name"),
        ({"images": [uri(RED[:-200])]}, "cannot be read"),
        ({"images": [uri(b"not an image")]}, "cannot be read"),
        ({"images": [uri(RED)], "question": "<image> or <image>?"}, "2 <image> and the row 1"),
        ({"images": [5]}, "must be bytes, a path or a data URI"),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, row, words):
    with pytest.raises(UserError, match=f"rows.jsonl:1.*{words}"):
        loaded(tmp_path / "rows.jsonl", [{"question": "what?", "answer": "a", **row}])


def test_bombs_and_large_files_are_refused(monkeypatch):
    monkeypatch.setattr(image_store, "MOST_PIXELS", 32 * 24 - 1)
    with pytest.raises(UserError, match="768 pixels; shrink it"):
        image_part({"image": uri(RED)}, ImageStore())
    monkeypatch.setattr(image_store, "MOST_BYTES", len(BLUE) - 1)
    with pytest.raises(UserError, match="bytes; shrink it"):
        image_part({"image": uri(BLUE)}, ImageStore())


def test_images_without_a_model_for_them_and_marks_without_images(prompts, tokenizer, tmp_path):
    (row,) = loaded(
        tmp_path / "a.jsonl", [{"question": "what?", "images": [uri(RED)], "answer": "a"}]
    )
    with pytest.raises(UserError, match="row 1 has images, and the model takes none"):
        Prompts(tokenizer).check(row, "row 1")
    with pytest.raises(UserError, match="row 1 has <image> and no images"):
        prompts.check({"question": "a <image>?"}, "row 1")


def test_an_image_that_is_damaged_later_fails_its_row_alone(prompts, tmp_path):
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    rows = [{"question": "what?", "images": ["red.png"], "answer": "a"}]
    (row,) = loaded(tmp_path / "rows.jsonl", rows, prompts)
    prompts.check(row, "row 1")
    path.write_bytes(RED[:100])
    with pytest.raises(UserError, match="an image cannot be read"):
        prompts.ids(row, "group 0")


def test_a_store_moves_and_keeps_each_image_once(tmp_path):
    store = ImageStore()
    names = [store.put(x) for x in (RED, BLUE, RED)]
    assert len(set(names)) == 2
    store.move(tmp_path / "run")
    assert {p.name for p in (tmp_path / "run").iterdir()} == set(names)
    assert store.get(names[0]) == RED
    with pytest.raises(UserError, match=r"the image .* is missing"):
        store.get("0" * 32)
    (tmp_path / "secret").write_text("not an image of the run")
    for path in ("../secret", str(tmp_path / "secret"), ""):
        with pytest.raises(UserError, match="is no image's name"):
            store.get(path)


def test_prompts_of_several_threads_keep_their_own_texts(prompts):
    names = (prompts.images.store.put(RED),)
    texts = [f"<image>{'x' * n}" for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: prompts.images.expanded(text, names), texts))
    assert [text.rpartition(">")[2] for text in found] == ["x" * n for n in range(200)]


def test_bytes_of_a_text_are_no_image():
    assert [data_uri(x) for x in (b"BMW or Audi?", b"RIFF is a format", b"GIF8")] == [None] * 3
    assert data_uri(RED) == "data:image;base64," + uri(RED).partition(",")[2]


class Camera:
    name, description = "camera", "Shows what is in front of it."
    parameters: ClassVar = {"properties": {"zoom": {"type": "string"}}}

    def run(self, zoom):
        return f"left {uri(RED)} right {uri(BLUE)}<|end|>" if zoom == "two" else uri(b"none")


def test_a_tool_shows_images_between_texts(prompts, processor):
    pool = RewardPool({})
    calls = ["<camera>", "two</camera>", "<camera>", "broken</camera>", "done<|end|>"]
    fleet = Scripted(prompts.tokenizer, lambda *_: calls.pop(0))
    tools = [f"{__file__}:Camera"]
    workflow = ToolUse(prompts, Sampling(max_new_tokens=400), pool, 1, SandboxOptions(), tools)
    (t,) = asyncio.run(
        workflow.run(fleet, Task({"question": "look", "answer": "1"}, 0, 0))
    ).trajectories
    pool.close()
    assert t.images == (name_of(RED), name_of(BLUE))
    seen = prompts.tokenizer.decode([int(i) for i in t.tokens[~t.loss_mask]])
    shown = pictures.EACH * "<image>"
    before, after = seen.split(" right ")
    assert before.count(shown) == after.count(shown) == 1
    assert "left <fake" in before
    assert "Error: an image cannot be read" in after
    assert "base64" not in seen
    ids, whole = workflow._observation(f"{uri(RED)} {'x' * 999}")
    assert (ids.images, whole) == ((), True)
    assert "max_output_tokens=256" in prompts.tokenizer.decode(list(ids))
    for text, words in (
        (100 * f"{uri(RED)} ", "max_output_tokens"),
        (f"{uri(RED)} {40_000 * 'x'}", "too long"),
    ):
        ids, _ = workflow._observation(text)
        assert ids.images == ()
        assert words in prompts.tokenizer.decode(list(ids))

    blind = ToolUse(
        Prompts(prompts.tokenizer), Sampling(max_new_tokens=9), pool, 1, SandboxOptions(), tools
    )
    ids, _ = blind._observation(f"left {uri(RED)}.")
    assert "left [image]." in prompts.tokenizer.decode(list(ids))
