"""A transformers model on packed rows: log-probabilities, entropies and values of each token.

The model gets a microbatch's rows [B, T] as one sequence without padding; its results return to
the tokens' places. Shapes: N tokens without padding, D the model's width.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import logging

from rlx.base import UserError, packages_of
from rlx.model import kept_tokens
from rlx.model.lora_config import PREFIX, LoraConfig, modules
from rlx.train.packing import segment_sizes
from rlx_torch import vision
from rlx_torch.attention import Blocks, Trees, blocks_of, kernel

Batch = Mapping[str, Any]
LAYOUT = ("longest", "blocks", "cu_seq_lens", "places", "scored", "computed", "states_at", "seen")
_LAYERS = {"full_attention", "sliding_attention"}  # others carry a state across segments


class Valued(nn.Module):
    """A model with a value head of zeros in place of its logits: a critic or a reward model."""

    def __init__(self, model: Any):
        super().__init__()
        self.config = model.config
        self.model = model.base_model
        width = model.get_output_embeddings().in_features
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    @property
    def base_model(self) -> nn.Module:
        """The decoder without its head."""
        return self.model

    @property
    def tp_plan(self) -> dict[str, str]:
        """Transformers' plan for tensor parallelism: name of a module → style."""
        return {f"model.{name}": style for name, style in self.model.tp_plan.items()}


def load(path: str | Path, device: str, compute_dtype: str, remat: bool = False) -> Any:
    """Return the causal language model of an HF directory, its parameters float32 on `device`.

    Autocast computes products in `compute_dtype`. `remat` keeps only each layer's input and
    recomputes the rest in the backward pass.
    """
    logging.disable_progress_bar()
    config = packable_config(path)
    attention = _attention(config, kernel(device, compute_dtype, config.model_type))
    model: Any = auto(config).from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, device_map=device,
        trust_remote_code=False,
    )  # fmt: skip
    ready(model, remat)
    return model


def ready(model: Any, remat: bool) -> None:
    """Prepare a model for training, with `remat` as of `load` and Liger's kernels if installed."""
    if torch.cuda.is_available() and find_spec("liger_kernel"):
        kernels = {"rope": True, "rms_norm": True, "swiglu": True}
        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # there are none
        apply_liger_kernel(model, kernels | losses)
    if remat:
        # Older releases of transformers have the second name.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": False})
    # Train mode, because remat needs it, but no dropout: the fleet has none.
    for module in model.train().modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or "drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def layers(model: Any) -> list[nn.Module]:
    """Return a decoder's layers: the modules that transformers does not split over devices."""
    names, inner = set(model.base_model._no_split_modules or ()), vision.decoder(model)
    return [m for m in inner.modules() if names & {kind.__name__ for kind in type(m).__mro__}]


def empty(path: str | Path, kernel: str = "rlx_segments") -> Any:
    """Return the model of an HF directory with uninitialised parameters."""
    config = packable_config(path)
    return auto(config).from_config(
        config, dtype=torch.float32, attn_implementation=_attention(config, kernel),
        trust_remote_code=False,
    )  # fmt: skip


def auto(config: Any) -> Any:
    """Return the class of transformers that makes a config's model."""
    if vision.sees(config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _attention(config: Any, name: str) -> Any:
    """Return what transformers takes to use an attention in the decoder, not before it."""
    return {"text_config": name} if vision.sees(config) else name


def packable_config(path: str | Path) -> Any:
    """Return transformers' config of an HF directory; UserError if it cannot take packed rows."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if vision.sees(config):
            classes = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind: Any = classes[type(config)]  # one class for each of these
    except (KeyError, ValueError) as error:
        text = f"{path} has no causal language model that transformers supports"
        raise UserError(f"{text} ({str(error).splitlines()[0]}); use another model") from None
    text_config = config.get_text_config()
    others = set(getattr(text_config, "layer_types", None) or ()) - _LAYERS
    if others or not kind._supports_attention_backend:
        what = f"layers of {', '.join(sorted(others))}" if others else "attention of its own"
        raise UserError(
            f"{kind.__name__} has {what}, which would mix packed sequences; trainer=torch needs a "
            "model with only attention by transformers' interface: use another model"
        )
    width = getattr(text_config, "moe_intermediate_size", None) or 0
    if width % 4:  # rows of float32 that begin at multiples of 16 bytes
        raise UserError(
            f"{path} has moe_intermediate_size={width}; PyTorch's product of experts needs a "
            "multiple of 4: use trainer=jax"
        )
    return config


def narrow(model: Any, lora: LoraConfig | None, frozen: bool) -> None:
    """Freeze what is not trained: with `lora` all but adapters, which are added, uninitialised.

    A tower of vision is `frozen`, or gets adapters too where its matrices have the targets' names.
    """
    if frozen:
        vision.freeze(model)
    if lora is None:
        return
    with packages_of("torch", "lora.rank needs PEFT"):
        import peft
    names = modules(lora.targets, {n.rpartition(".")[2] for n, _ in model.named_modules()})
    towers = rf"(?!.*\b({'|'.join(vision.DECODERS)})\.).*" if vision.sees(model.config) else None
    config = peft.LoraConfig(
        r=lora.rank, target_modules=names, exclude_modules=towers if frozen else None,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT allows any number
    )  # fmt: skip
    try:
        peft.inject_adapter_in_model(config, model)  # model.add_adapter may need a later PEFT
    except ValueError as error:
        raise UserError(
            f"{type(model).__name__} has none of {', '.join(names)} ({str(error)[:80]}); set "
            "lora.rank=0"
        ) from None


def adapters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of a model's adapters by name."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


@dataclasses.dataclass
class OtherAdapters:
    """Adapters of a reference policy by the model's names, which can replace the model's own."""

    model: Any
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any) -> "OtherAdapters":
        """Return a copy of a model's present adapters."""
        return cls(model, {name: p.detach().clone() for name, p in adapters(model).items()})

    @contextmanager
    def put(self) -> Iterator[Any]:
        """Yield the model with these adapters, then restore its own. Not for gradients."""
        previous = OtherAdapters.of(self.model)
        self._copy()
        try:
            yield self.model
        finally:
            previous._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        for name, p in adapters(self.model).items():
            p.copy_(self.tensors[name])


class Weight(NamedTuple):
    """A model's tensor, maybe sharded, and a function that returns its adapter's addition."""

    tensor: Tensor
    added: Callable[[], Tensor] | None = None

    def copied(self, dtype: torch.dtype) -> Tensor:
        """Return a whole copy in `dtype`, after adding in the tensor's own dtype."""
        if self.added is None:
            return full(self.tensor.to(dtype, copy=True))
        return (full(self.tensor) + self.added()).to(dtype)


def full(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered on every process if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def published_tensors(model: Any, only_adapters: bool = False) -> dict[str, Weight]:
    """Return a model's tensors by name with adapters merged, or only these by PEFT's names."""
    if only_adapters:
        items = adapters(model).items()
        return {PREFIX + name.replace(".default", ""): Weight(p.detach()) for name, p in items}
    weights: dict[str, Weight] = {}
    tied = model.config.tie_word_embeddings
    for name, tensor in {**dict(model.named_parameters()), **saved_buffers(model)}.items():
        layer, base, last = name.rpartition(".base_layer.")
        if base:
            product = partial(_adapter_product, model.get_submodule(layer))
            added = product if last == "weight" else None
            weights[f"{layer}.{last}"] = Weight(tensor.detach(), added)
        elif ".lora_" not in name and (name != "lm_head.weight" or not tied):
            weights[name] = Weight(tensor.detach())
    return weights


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a model's files have, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


@torch.no_grad()
def _adapter_product(layer: Any) -> Tensor:
    down, up = (full(pair["default"].weight) for pair in (layer.lora_A, layer.lora_B))
    return (up @ down) * layer.scaling["default"]


@torch.no_grad()
def require_packed(model: Any) -> None:
    """Raise UserError unless packing leaves the model's log-probabilities unchanged."""
    config = model.config.get_text_config()
    device, implementation = next(model.parameters()).device.type, config._attn_implementation
    sizes, number = (3, 4), config.vocab_size
    arrays = {
        "tokens": np.arange(1, 8, dtype=np.int32)[None] % number,
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in sizes])[None],
        "segment_ids": np.repeat(np.arange(1, 3, dtype=np.int32), sizes)[None],
    }
    model.set_attn_implementation(_attention(model.config, "rlx_segments"))
    packed = put(arrays, device)
    scores = logprobs(model, packed, temperature=1.0, chunk=2)[0][0].split(sizes)
    for got, tokens in zip(scores, packed["tokens"][0].long().split(sizes), strict=True):
        blocks = blocks_of([len(tokens)], device)
        logits = model(input_ids=tokens[None], use_cache=False, blocks=blocks).logits[0]
        want = torch.log_softmax(logits.float(), -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        if not torch.allclose(got[1:], want, atol=1e-3):
            raise UserError(
                f"{type(model).__name__} gives other log-probabilities to packed sequences than to "
                "single ones; trainer=torch cannot train it: use another model"
            )
    model.set_attn_implementation(_attention(model.config, implementation))


def put(
    arrays: Mapping[str, np.ndarray], device: str, images: vision.Images | None = None
) -> dict[str, Any]:
    """Return a packed microbatch on the device, with its LAYOUT: segments, and scored tokens.

    Tokens of `loss_mask` are scored, or all without one, except each segment's first. `images` are
    those of a model that sees them.
    """
    sizes = segment_sizes(arrays["segment_ids"])
    sizes, places = sizes[sizes > 0], np.flatnonzero(arrays["segment_ids"])
    if not len(places):  # only padding: keep a token, which no loss reads
        sizes, places = np.ones(1, np.int32), np.zeros(1, int)
    parts = np.split(places, np.cumsum(sizes)[:-1])
    order = np.argsort(-sizes, kind="stable")  # so that one call computes several similar ones
    sizes, places = sizes[order], np.concatenate([parts[i] for i in order])
    ends = np.append(0, np.cumsum(sizes)).astype(np.int32)
    mask = arrays.get("loss_mask", arrays["segment_ids"] > 0).reshape(-1)[places]
    mask[ends[:-1]] = False
    # At least one, which no loss reads: every process must call its head, which may be sharded.
    scored_at = np.flatnonzero(mask) if mask.any() else np.zeros(1, int)
    blocks: Blocks | Trees = blocks_of(sizes.tolist(), device)
    computed = states_at = None
    if "tree_tokens" in arrays:
        blocks, computed, states_at = _trees(arrays, places, device)
    seen = images and images.seen(arrays, places, sizes, order, device)
    return {
        **{k: torch.from_numpy(x).to(device) for k, x in arrays.items() if k != "images"},
        "longest": int(sizes.max()),
        "blocks": (seen and seen.trees) or blocks,
        "cu_seq_lens": torch.from_numpy(ends).to(device),
        "places": torch.from_numpy(places).to(device),
        "scored": torch.from_numpy(scored_at).to(device),
        "computed": computed,
        "states_at": states_at,
        "seen": seen,
    }


def _trees(
    arrays: Mapping[str, np.ndarray], used: np.ndarray, device: str
) -> tuple[Trees, Tensor, Tensor]:
    """Return trees, the flat places of their tokens, and which token's state each of `used` reads.

    `used` are flat places of the loss's tokens; `arrays` as of `prefix_trees.microbatches`.
    """
    width = arrays["tree_tokens"].shape[1]
    mask = arrays["tree_counts"].ravel() > 0
    mask[0] |= not mask.any()  # only padding, as above
    computed = np.flatnonzero(mask)
    number = np.cumsum(mask) - 1
    slots = used // arrays["sources"].shape[1] * width + arrays["sources"].ravel()[used]
    # Tokens of a row have no gaps, so that ends move as their tokens do.
    ends = np.arange(len(computed)) + arrays["tree_ends"].ravel()[computed] - computed % width
    trees = Trees.of(ends, arrays["tree_positions"].ravel()[computed], device)
    return trees, torch.from_numpy(computed).to(device), torch.from_numpy(number[slots]).to(device)


def hf_tensors(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of whole layers with the names and shapes of HF's files."""
    return revert_weight_conversion(model.model if isinstance(model, Valued) else model, tensors)


def hidden_states(model: Any, batch: Batch) -> Tensor:
    """Return the decoder's output after the last norm for each token without padding, [N, D]."""
    places, ends, longest = batch["places"], batch["cu_seq_lens"], batch["longest"]
    names, states_at = ("tokens", "positions"), batch["states_at"]
    if states_at is not None:
        places, names = batch["computed"], ("tree_tokens", "tree_positions")
    tokens, positions = (batch[name].reshape(-1)[places][None] for name in names)
    inner, args = model.base_model, {"input_ids": tokens, "position_ids": positions}
    if (seen := batch["seen"]) is not None:
        inner, args = vision.decoder(model), seen.inputs(model, tokens, positions)
    states = inner(
        **args, use_cache=False, blocks=batch["blocks"],
        cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest,
    ).last_hidden_state[0]  # fmt: skip
    return states if states_at is None else states.index_select(0, states_at)


def logprobs(
    model: Any, batch: Batch, *, temperature: float, chunk: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each scored token's log-probability given its segment's earlier ones, and the entropy.

    Args:
      batch: from `put`. temperature: > 0. chunk: tokens whose logits exist at one time.
      entropy_gradient: whether entropies are differentiated too.

    Returns:
      Two [B, T] float32, nats, as of `rlx.model.decoder.logprobs`; 0 at tokens that are not scored.
    """
    scored = batch["scored"]
    tokens = batch["tokens"].reshape(-1)[batch["places"][scored]].long()
    picked, entropy = token_scores(
        model, hidden_states(model, batch)[scored - 1], tokens[:, None], chunk=chunk,
        temperature=temperature, entropy_gradient=entropy_gradient, drawn_from=_drawn_from(batch),
    )  # fmt: skip
    return _back(picked[:, 0], batch, scored), _back(entropy, batch, scored)


def token_scores(
    model: Any, states: Tensor, targets: Tensor, *, chunk: int, temperature: float = 1.0,
    entropy_gradient: bool = False,
    drawn_from: Callable[[int, int, int], Tensor] | None = None,  # of `_drawn_from`
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return log-probabilities of K tokens after each state, and the distribution's entropy.

    Args:
      states: [N, D] of `hidden_states`. targets: [N, K] int64. Others as of `logprobs`.

    Returns:
      [N, K] and [N] float32, nats.
    """
    head = model.get_output_embeddings()
    cap = getattr(model.config, "final_logit_softcapping", None)
    scale = getattr(model.config, "logit_scale", 1.0) / getattr(model.config, "logits_scaling", 1.0)

    def scores(states: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
        logits = head(states).float() * scale if scale != 1 else head(states).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logits = logits if temperature == 1 else logits / temperature
        if drawn_from:
            logits = logits.masked_fill(~drawn_from(first, *logits.shape), kept_tokens.OUTSIDE)
        logprobs = torch.log_softmax(logits, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets), entropy

    starts = range(0, len(targets), chunk)
    parts = [*zip(states.split(chunk), targets.split(chunk), starts, strict=True)]
    if len(parts) == 1:  # the backward pass would recompute all logits at once
        return scores(*parts[0])
    results = [checkpoint(scores, *part, use_reentrant=False) for part in parts]
    picked, entropy = (torch.cat(part) for part in zip(*results, strict=True))
    return picked, entropy


def _drawn_from(batch: Batch) -> Callable[[int, int, int], Tensor] | None:
    """Return a function that gives the tokens that some scored ones were drawn from; None: all.

    Its arguments are the first of them, their number and V; its result is [number, V] bool.
    """
    if "kept_ids" not in batch:
        return None
    ids, at, excluded = (batch[name] for name in kept_tokens.INPUTS)
    places, rows = batch["places"][batch["scored"]], torch.arange(len(at), device=at.device)
    number = torch.full_like(excluded, -1, dtype=torch.long).view(-1)
    number[places] = torch.arange(len(places), device=at.device)
    owners = number[(rows[:, None] * excluded.shape[1] + at).view(-1)]
    ids, excluded = ids.reshape(-1).long(), excluded.reshape(-1)[places]

    def masks(first: int, size: int, vocab: int) -> Tensor:
        inside = (owners >= first) & (owners < first + size)
        listed = torch.zeros((size + 1, vocab), dtype=torch.bool, device=ids.device)
        listed[torch.where(inside, owners - first, size), ids] = True
        return listed[:size] != excluded[first : first + size, None]

    return masks


def values(model: Valued, batch: Batch) -> Tensor:
    """Return V after each token, [B, T] float32, 0 at padding."""
    states = hidden_states(model, batch)
    with torch.autocast(states.device.type, enabled=False):
        return _back((states.float() @ model.score.weight.float().T)[:, 0], batch)


def before(after_BT: Tensor, segment_ids: Tensor) -> Tensor:
    """Return V before each token from V after each token, [B, T]."""
    moved = nn.functional.pad(after_BT[:, :-1], (1, 0))
    same = nn.functional.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0))
    return torch.where(same & (segment_ids > 0), moved, 0.0)


def _back(x_K: Tensor, batch: Batch, which: Any = slice(None)) -> Tensor:
    """Return x [K] of tokens `which` at their places, [B, T], 0 elsewhere."""
    places, row = batch["places"][which], batch["tokens"].shape[1]
    out = x_K.new_zeros(batch["tokens"].shape, dtype=torch.float32)
    return out.index_put((places // row, places % row), x_K.float())  # no view, for FSDP's hooks
