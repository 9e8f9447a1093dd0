"""vLLM with images: tokens and scores are transformers', before and after an update."""

import asyncio
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rlx.engines.engine import MissingImage
from rlx.engines.vllm.vllm_images import placed_input
from rlx.fleet.requests import Request, Sampling, ScoreRequest
from rlx.system.image_store import name_of
from tests.fixtures import pictures

pytestmark = pytest.mark.vllm
FILES = [pictures.png(seed) for seed in (0, 1)]
NAMES = tuple(map(name_of, FILES))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A random model of the family Idefics3 with its processor."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        PreTrainedTokenizerFast,
    )  # fmt: skip

    words = ["<pad>", "<|end|>", *pictures.MARKS, "<row_1_col_1>", *"abcdefghij", "<unk>"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|end|>", unk_token="<unk>",
        chat_template=pictures.TEMPLATE,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    pictures.processor(tokenizer).save_pretrained(path)
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 32,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
        "max_position_embeddings": 256,
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    mark = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config=text, vision_config=tower, scale_factor=2, image_token_id=mark,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    Idefics3ForConditionalGeneration(config).save_pretrained(path)
    return path


def prompt_of(path):
    """The tokens of a question about both pictures, as the processor makes them."""
    from transformers import AutoProcessor

    from rlx.system.image_store import open_picture

    made = AutoProcessor.from_pretrained(path)(
        text=["a <image> b <image> c"], images=[list(map(open_picture, FILES))]
    )
    return np.array(made["input_ids"][0], np.int32)


def wanted(path, tokens, first, weights=None):
    """Transformers' log-probabilities of tokens[first:]."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    from rlx.system.image_store import open_picture

    model = AutoModelForImageTextToText.from_pretrained(path)
    if weights:
        model.load_state_dict(weights)
    inputs = AutoImageProcessor.from_pretrained(path)(
        [list(map(open_picture, FILES))], return_tensors="pt"
    )
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits = model(ids, **inputs).logits[0].log_softmax(-1)
    return logits[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].numpy()


async def measured(model_dir, weights, out):
    """Write what an engine says of both pictures, before and after an update, to an .npz file."""
    from rlx.engines.vllm.vllm_engine import VllmEngine

    prompt = prompt_of(model_dir)
    engine = VllmEngine(str(model_dir), slots=4, max_model_len=64)
    await engine.start()

    async def score(tokens, names=NAMES):
        return (await engine.score(ScoreRequest(tokens, len(prompt), 1.0, images=names))).logprobs

    try:
        # An image token that the model drew is a token like any other.
        marks = [int(prompt[4])] * 2
        marked = np.concatenate([prompt, marks, [5, 6]]).astype(np.int32)
        with pytest.raises(MissingImage):
            await score(marked)
        for name, data in zip(NAMES, FILES, strict=True):
            await engine.add_image(name, data)
        drawn, logprobs = [], []
        sampling = Sampling(max_new_tokens=6, seed=1)
        async for chunk in engine.generate(Request("a", prompt, sampling, images=NAMES)):
            drawn += chunk.tokens
            logprobs += chunk.logprobs
        asked = np.concatenate([prompt, drawn]).astype(np.int32)
        found = {"prompt": prompt, "asked": asked, "logprobs": logprobs}
        found |= {"before": await score(asked), "swapped": await score(asked, NAMES[::-1])}
        found["marked"] = await score(marked)
        await engine.load(str(weights), 1)
        found["after"] = await score(asked)
        with pytest.raises(ValueError, match="cannot be read"):
            await engine.add_image("x", b"nothing")
        with pytest.raises(ValueError, match="no placeholders of image"):
            await engine.score(ScoreRequest(asked[6:], len(prompt) - 6, 1.0, images=NAMES))
        np.savez(out, **found)
    finally:
        await engine.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_tokens_and_scores_are_transformers_before_and_after_an_update(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = {n: 1.5 * x for n, x in load_file(model_dir / "model.safetensors").items()}
    save_file(weights, tmp_path / "new.safetensors")
    # vLLM forks, which only a process without JAX's threads may do.
    places = [model_dir, tmp_path / "new.safetensors", tmp_path / "found.npz"]
    command = [sys.executable, "-m", "tests.engines.vllm_images_test", *map(str, places)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = np.load(tmp_path / "found.npz")
    prompt, asked, logprobs = found["prompt"], found["asked"], found["logprobs"]
    np.testing.assert_allclose(logprobs, found["before"], atol=1e-5)
    if int(prompt[4]) not in asked[len(prompt) :]:  # transformers would take it for a placeholder
        np.testing.assert_allclose(logprobs, wanted(model_dir, asked, len(prompt)), atol=1e-4)
        new = wanted(model_dir, asked, len(prompt), weights)
        np.testing.assert_allclose(found["after"], new, atol=1e-4)
    assert np.abs(found["swapped"] - found["before"]).max() > 1e-3
    assert np.isfinite(found["marked"]).all()


def test_placeholders_are_found_in_order_and_sampled_marks_are_left_alone():
    pattern = np.array([3, 7, 7, 3], np.int32)
    image = SimpleNamespace(item=None, tokens=pattern[1:3], embedded=np.ones(2, bool))
    prompt = np.array([1, *pattern, 7, 9, *pattern, 2], np.int32)
    found = placed_input(prompt, ["a", "b"], [image, image])["mm_placeholders"]["image"]
    assert [(place.offset, place.length) for place in found] == [(2, 2), (8, 2)]
    with pytest.raises(ValueError, match="no placeholders of image 3"):
        placed_input(prompt, ["a", "b", "c"], [image] * 3)


if __name__ == "__main__":
    asyncio.run(measured(*sys.argv[1:]))
