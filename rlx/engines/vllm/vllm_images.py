"""Images in vLLM's requests: prepared once, then placed where the prompt has their placeholders.

vLLM would expand placeholders itself. Here prompts come with expanded ones, as the trainer sees
them, and may contain tokens that the model sampled, which must stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.system.image_store import open_picture


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """The inputs of a model for one image."""

    item: Any  # vLLM's arguments of the model
    tokens: np.ndarray  # [T] int32, from its first placeholder to the last one
    embedded: np.ndarray  # [T] bool, which of these are placeholders
    num_bytes: int


def image_inputs(renderer: Any, data: bytes) -> PreparedImage:
    """Return the inputs for an image file, by the processor of vLLM's renderer; or ValueError."""
    picture = open_picture(data)
    text = renderer.mm_processor.dummy_inputs.get_dummy_text({"image": 1})
    ids = renderer.get_tokenizer().encode(text, add_special_tokens=False)
    inputs = renderer._process_multimodal(ids, {"image": [picture]}, None, None)
    (item,), (place,) = inputs["mm_kwargs"]["image"], inputs["mm_placeholders"]["image"]
    tokens = np.array(inputs["prompt_token_ids"][place.offset :][: place.length], np.int32)
    every = np.ones(place.length, bool)
    embedded = every if place.is_embed is None else np.asarray(place.is_embed)
    ends = np.flatnonzero(embedded)[[0, -1]]
    span = slice(ends[0], ends[1] + 1)
    num_bytes = sum(getattr(field.data, "nbytes", 0) for field in item.values())
    return PreparedImage(item, tokens[span], embedded[span], num_bytes)


def placed_input(prompt: np.ndarray, names: Sequence[str], images: Sequence[PreparedImage]) -> Any:
    """Return vLLM's input of a prompt, [T] int32, and its images; ValueError: no placeholders."""
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    places, at = list[Any](), 0
    for number, image in enumerate(images, 1):
        starts = np.flatnonzero(prompt[at : len(prompt) - len(image.tokens) + 1] == image.tokens[0])
        size = len(image.tokens)
        fits = (at + s for s in starts if (prompt[at + s : at + s + size] == image.tokens).all())
        if (start := next(fits, None)) is None:
            raise ValueError(
                f"the prompt has no placeholders of image {number}; expand them as the model's "
                "processor does"
            )
        places.append(PlaceholderRange(int(start), size, torch.from_numpy(image.embedded)))
        at = int(start) + size
    items = MultiModalKwargsItems({"image": [image.item for image in images]})
    return mm_input(prompt.tolist(), items, {"image": [*names]}, {"image": places})
