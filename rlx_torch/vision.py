"""Images in transformers' models: pixels, features of a tower, and places among packed tokens.

Shapes: N tokens without padding, S segments, D the width of the language model.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlx.base import UserError, install
from rlx.system import image_store
from rlx_torch.attention import Trees

# Model types whose packed rows were compared with their own forward pass on single sequences.
FAMILIES = ("gemma3", "idefics3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm")
DECODERS = ("language_model", "text_model")  # names of the language model in these
# In these, tokens of an image see all of it.
_BOTH_WAYS = ("gemma3",)
ROOM = 2 << 30  # bytes of kept features or pixels, in the host's memory


def sees(config: Any) -> bool:
    """Return whether rlx trains the model of a transformers config on images."""
    return config.model_type in FAMILIES


def decoder(model: Any) -> nn.Module:
    """Return the language model inside a model, without its head."""
    base = model.base_model
    return base.get_decoder() if sees(model.config) else base


def tower(model: Any) -> dict[str, nn.Parameter]:
    """Return by name the parameters before the language model: vision tower and connector."""
    of_decoder = {id(p) for p in decoder(model).parameters()}
    parameters = model.base_model.named_parameters() if sees(model.config) else ()
    return {name: p for name, p in parameters if id(p) not in of_decoder}


def freeze(model: Any) -> None:
    """Leave the vision tower and what connects it to the language model as they are."""
    for p in tower(model).values():
        p.requires_grad_(False)


class Image(NamedTuple):
    """A processed image: inputs of the tower, or its features if the tower is frozen."""

    inputs: dict[str, Tensor]
    # [n, D] for each of its n placeholders, and what is added after the first layers, if anything
    features: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(x.nbytes for x in (*self.inputs.values(), *self.features))


class Images:
    """The images of a run as a model's tower takes them; the last used ones are kept.

    The model has this `config` of transformers, and its image processor is in an HF `directory`.
    `read` returns the bytes of an image by its name. Of a `frozen` tower features are kept.
    """

    def __init__(self, directory: Path, config: Any, read: Callable[[str], bytes], frozen: bool):
        self.config, self.frozen = config, frozen
        self._directory, self._read = directory, read
        self._kept: OrderedDict[str, Image] = OrderedDict()
        self._bytes = 0  # of these

    @cached_property
    def processor(self) -> Any:
        """The image processor of the directory; UserError if it has none."""
        try:
            from transformers import AutoImageProcessor

            return AutoImageProcessor.from_pretrained(self._directory, trust_remote_code=False)
        except ImportError as error:
            text = str(error).strip().splitlines()[0]
            raise UserError(f"images need packages ({text}); {install('vision')}") from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self._directory} has no image processor ({str(error).splitlines()[0]}); add the "
                "files that its model came with, preprocessor_config.json among them"
            ) from None

    def seen_by(self, base: Any, names: Iterable[str]) -> dict[str, Image]:
        """Return images by name, with the features that the model `base` gives them."""
        table = {name: self._image(base, name) for name in dict.fromkeys(names)}
        alike: dict[Any, list[str]] = {}  # those that go through the tower together
        for name, image in table.items() if not self.frozen else ():
            alike.setdefault(tuple(x.shape for x in image.inputs.values()), []).append(name)
        for same in alike.values():
            first, *_ = inputs = [table[name].inputs for name in same]
            joined = {key: torch.cat([each[key] for each in inputs]) for key in first}
            parts = zip(*(x.chunk(len(same)) for x in _features(base, joined)), strict=True)
            for name, features in zip(same, parts, strict=True):
                table[name] = Image(table[name].inputs, features)
        return table

    def _image(self, base: Any, name: str) -> Image:
        if name not in self._kept:
            self._kept[name] = self._processed(base, name)
            self._bytes += self._kept[name].bytes
        self._kept.move_to_end(name)
        while len(self._kept) > 1 and self._bytes > ROOM:
            self._bytes -= self._kept.popitem(last=False)[1].bytes
        return self._kept[name]

    def _processed(self, base: Any, name: str) -> Image:
        picture = image_store.open_picture(self._read(name))
        parameters = inspect.signature(base.get_image_features).parameters
        batch = self.processor(images=[picture], return_tensors="pt")
        inputs = {key: torch.as_tensor(x) for key, x in batch.items() if key in parameters}
        if not self.frozen:
            return Image(inputs)
        with torch.no_grad():
            features = tuple(x.cpu() for x in _features(base, inputs))
        return Image({k: x for k, x in inputs.items() if "grid" in k}, features)

    def seen(
        self, arrays: Mapping[str, np.ndarray], places: np.ndarray, sizes: np.ndarray,
        order: np.ndarray, device: str,
    ) -> "Seen":  # fmt: skip
        """Return the images of a packed microbatch.

        `places` are the flat places of its N tokens, in segments of `sizes` [S]; `order` has the
        number of each segment among the packed ones. Of `arrays`, `images` has for each row a tuple
        of its segments' names.
        """
        tuples = [names for row in arrays.get("images", ()) for names in row] or [()] * len(sizes)
        holders = np.zeros(len(places), bool)
        if "versions" in arrays:
            tokens, versions = (arrays[name].ravel()[places] for name in ("tokens", "versions"))
            holders = (tokens == self.config.image_token_id) & (versions < 0)
        names = tuple(tuples[i] for i in order)
        return Seen(self, names, sizes, torch.from_numpy(holders).to(device))


@dataclass(eq=False)
class Seen:
    """The images of a packed microbatch, and which of its N tokens are their placeholders."""

    images: Images
    names: tuple[tuple[str, ...], ...]  # of each segment
    sizes: np.ndarray  # [S], tokens
    holders: Tensor  # [N] bool
    positions: Tensor | None = None  # [3, 1, N], made by the first `inputs`

    @property
    def trees(self) -> Trees | None:
        """Segments in which the tokens of an image see all of it, if the model wants them."""
        if self.images.config.model_type not in _BOTH_WAYS or not any(self.names):
            return None
        holders, ends = self.holders.cpu().numpy(), np.cumsum(self.sizes)
        places = np.concatenate([np.arange(n) for n in self.sizes])
        last = np.arange(len(holders))
        for at in np.flatnonzero(holders)[::-1]:
            if at + 1 < len(last) and holders[at + 1] and places[at + 1]:
                last[at] = last[at + 1]
        return Trees.of(np.repeat(ends, self.sizes), places, str(self.holders.device), last)

    def inputs(self, model: Any, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the arguments of a language model for tokens and positions, each [1, N].

        UserError if the placeholders of a segment are not as many as its images' features.
        """
        base, holders = model.base_model, self.holders[None]
        embeds = base.get_input_embeddings()(tokens.masked_fill(holders, 0))
        table = self.images.seen_by(base, (name for part in self.names for name in part))
        counts = [int(part.sum()) for part in self.holders.split(self.sizes.tolist())]
        for names, count in zip(self.names, counts, strict=True):
            if (number := sum(len(table[name].features[0]) for name in names)) != count:
                raise UserError(
                    f"a trajectory has {count} placeholders of images among its tokens, and its "
                    f"{len(names)} images have {number} features; render it with the processor of "
                    "this model"
                )
        out: dict[str, Any] = {"position_ids": self._positions(base, tokens, positions, table)}
        if table:
            rows = zip(*(table[name].features for part in self.names for name in part), strict=True)
            first, *deep = (torch.cat(parts).to(embeds.device, embeds.dtype) for parts in rows)
            embeds = embeds.masked_scatter(holders[..., None], first)
            if deep:
                out |= {"visual_pos_masks": holders, "deepstack_visual_embeds": deep}
        if not self.images.frozen:  # FSDP wants gradients of the same parameters on all processes
            embeds = embeds + 0.0 * sum(p.sum() for p in tower(model).values())
        return {**out, "inputs_embeds": embeds}

    def _positions(
        self, base: Any, tokens: Tensor, positions: Tensor, table: Mapping[str, Image]
    ) -> Tensor:
        if not table or not hasattr(base, "get_rope_index"):
            return positions
        if self.positions is None:
            cuts, parts = self.sizes.tolist(), []
            split = (x.split(cuts, 1) for x in (tokens.long(), positions, self.holders[None]))
            for names, ids, plain, holders in zip(self.names, *split, strict=True):
                part = plain.expand(3, 1, -1)
                if names:
                    grids = torch.cat([table[name].inputs["image_grid_thw"] for name in names])
                    part, _ = base.get_rope_index(ids, holders.int(), grids.to(ids.device))
                parts.append(part.long())
            self.positions = torch.cat(parts, -1)
        return self.positions


def _features(base: Any, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return a tower's features of an image: those of its placeholders, then DeepStack's."""
    device = base.get_input_embeddings().weight.device
    out = base.get_image_features(**{k: x.to(device) for k, x in inputs.items()}, return_dict=True)
    parts = [out.pooler_output, *getattr(out, "deepstack_features", ())]
    lists = (part if isinstance(part, tuple | list) else [part] for part in parts)
    return tuple(torch.cat([x.reshape(-1, x.shape[-1]) for x in each]) for each in lists)
