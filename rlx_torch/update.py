"""The trainer in PyTorch, for models of transformers."""

import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes  # numpy knows the name bfloat16 by it
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from rlx.algorithms import kl, losses
from rlx.base import UserError
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.lora_config import LoraConfig
from rlx.model.model_config import CHUNK, ModelConfig
from rlx.model.tensors import BUCKET, Buckets, open_tensors
from rlx.train import objective
from rlx.train.batch_update import BatchUpdate, require_same
from rlx.train.packing import PackPlan
from rlx.train.train_options import OPTIMIZERS, OptimizerOptions, TrainOptions, rate_at
from rlx_torch import attention, packed_model, sharding, vision
from rlx_torch.optimizers import make_optimizer, step_offloaded
from rlx_torch.packed_model import OtherAdapters, Valued
from rlx_torch.sharding import Ranks
from rlx_torch.torch_checkpoint import Planner, Reader


@dataclasses.dataclass
class Learned:
    """A trained model, its optimizer, and the number of updates done."""

    model: Any
    optimizer: torch.optim.Optimizer
    options: OptimizerOptions
    total: int  # updates of the whole run
    updates: int = 0
    offloaded: bool = False  # the moments are in the host's memory


@dataclasses.dataclass
class TorchState:
    """The state that an update changes in place and a checkpoint holds."""

    policy: Learned
    step: int  # train batches done
    kl_coefficient: float  # β of the KL term, which may adapt
    reference: Any = None  # a policy that follows the trained one; None: frozen
    critic: Learned | None = None

    def tree(self) -> dict[str, Any]:
        """Return the state as nested dicts of tensors and numbers."""
        out: dict[str, Any] = {"step": self.step, "kl_coefficient": self.kl_coefficient}
        for name in ("policy", "critic"):
            if learned := getattr(self, name):
                tensors = _trained(learned.model)
                names = {id(p): key for key, p in tensors.items()}
                moments = {names[id(p)]: s for p, s in learned.optimizer.state.items()}
                out[name] = {"model": tensors, "moments": moments, "updates": learned.updates}
        if self.reference is not None:
            out["reference"] = _trained(self.reference)
        return out


class TorchUpdate(BatchUpdate):
    """The trainer in PyTorch; the state's tensors are changed in place.

    The run begins with the weights in the HF directory `model_dir`. `model_config` is theirs, for
    the run's records.
    """

    def __init__(self, model_config: ModelConfig, options: TrainOptions, model_dir: Path):
        self._ranks = Ranks(options.mesh)
        super().__init__(options, self._ranks.row_shards)
        self._directory = model_dir
        scores, self._given_head = self._algorithm.kind.scores, model_config.value_head
        self.model = dataclasses.replace(model_config, value_head=True) if scores else model_config
        self.images: Callable[[str], bytes] = _no_images  # the bytes of an image by its name
        self._pictures: vision.Images | None = None  # the same, as the model's tower takes them
        config = packed_model.packable_config(model_dir)
        self._frozen_tower = vision.sees(config) and options.vision == "frozen"
        if vision.sees(config):
            tower = self._frozen_tower
            self._pictures = vision.Images(model_dir, config, lambda name: self.images(name), tower)
        self._device = self._ranks.device
        if self._device == "cpu" and self._ranks.count == 1:  # no more threads than cores
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        kind = torch.cuda.get_device_name() if self._device == "cuda" else "cpu"
        self.devices = f"{self._ranks.count} × {kind} (PyTorch {torch.__version__})"
        if options.offload_optimizer and (self._device == "cpu" or self._ranks.count > 1):
            raise UserError(
                f"train.offload_optimizer needs a single process with a GPU, got {self.devices}; "
                "unset it"
            )
        frozen = self._algorithm.needs_reference and not options.reference_moves
        if frozen and not options.lora:
            self._reference = self._load()
        self._share_prefixes(self._obstacle(model_config))
        self._tree_cost = parameters.attention_cost(model_config, self._device)
        self.state_bytes = self._count_bytes()
        self._writer = ThreadPoolExecutor(1)

    def _obstacle(self, model: ModelConfig) -> str:
        """Return why this device has no attention over trees; empty if it has."""
        if self._pictures:
            return "models that see images are not computed over trees"
        dtype = self._options.compute_dtype
        kind = packed_model.packable_config(self._directory).model_type
        name = attention.kernel(self._device, dtype, kind)
        if name == "rlx_segments":
            return ""
        if name != "rlx_varlen":
            return f"{name} has no trees; PyTorch's FlexAttention, without that package, has"
        shape = model.num_heads, model.num_kv_heads, model.head_dim
        error = partial(attention.tree_error, *shape, self._device, getattr(torch, dtype))
        return self._wrong_trees("FlexAttention", error)

    def _count_bytes(self) -> int:
        with torch.device("meta"):
            shapes = packed_model.empty(self._directory)
            packed_model.narrow(shapes, self._options.lora, self._frozen_tower)
        numbers = sum(p.numel() for p in shapes.parameters() if p.requires_grad)
        moments, moves = OPTIMIZERS[self._options.optimizer.name], self._options.reference_moves
        return 4 * numbers * ((1 + moments) * (1 + bool(self._algorithm.critic)) + moves)

    def _load(self, valued: bool = False, lora: LoraConfig | None = None) -> Any:
        o = self._options
        args = self._directory, o.compute_dtype, o.remat != "none"
        if self._ranks.count > 1:
            model = self._ranks.load(*args, valued, lora, self._frozen_tower)
        else:
            model = packed_model.load(self._directory, self._device, *args[1:])
            model = Valued(model) if valued else model
            packed_model.narrow(model, lora, self._frozen_tower)
        if lora:
            sharding.begin_adapters(model, o.seed)
        return model

    # The state as a whole.

    def init(self) -> TorchState:
        o = self._options
        model = self._load(self._algorithm.kind.scores, o.lora)
        reference = self._load() if o.reference_moves and not o.lora else None
        if o.lora and self._algorithm.needs_reference:
            self._reference = OtherAdapters.of(model)  # which add nothing yet
            reference = OtherAdapters.of(model) if o.reference_moves else None
        critic = None
        if self._algorithm.critic:
            options = dataclasses.replace(o.optimizer, learning_rate=o.critic_learning_rate)
            updates = o.total_steps * o.minibatches
            critic = _new_learner(self._load(valued=True), options, updates, o.offload_optimizer)
        if self._given_head and self._ranks.count == 1:  # model_dir has a reward model
            with open_tensors(self._directory) as tensors, torch.no_grad():
                head = np.array(tensors["score.weight"], np.float32)
                model.score.weight.copy_(torch.from_numpy(head))
        if self.model.foreign and self._ranks.count == 1:
            packed_model.require_packed(model)
        if o.compile:
            for layer in packed_model.layers(model):
                layer.compile(dynamic=True)
        policy = _new_learner(model, o.optimizer, o.policy_updates, o.offload_optimizer)
        return TorchState(policy, 0, self._algorithm.kl_coefficient, reference, critic)

    def save(self, path: Path, state: TorchState) -> Future[None]:
        """Begin to write a copy of the state to `path`, by torch's distributed checkpoints."""
        tree = _mapped(state.tree(), lambda x: x.to("cpu", copy=True))
        return self._writer.submit(self._run_dcp, dcp.save, tree, path)

    def restore(self, path: Path) -> TorchState:
        state = self.init()
        tree = state.tree()
        reader = Reader(path)
        require_same(
            path, _shapes_text(reader.read_metadata().state_dict_metadata), _shapes_text(tree)
        )
        self._run_dcp(partial(dcp.load, storage_reader=reader, planner=Planner()), tree, path)
        state.step, state.kl_coefficient = tree["step"], tree["kl_coefficient"]
        for name in ("policy", "critic"):
            if learned := getattr(state, name):
                learned.updates = tree[name]["updates"]
        return state

    def weights(self, state: TorchState, adapters: bool = False) -> Buckets:
        model = state.policy.model
        tensors = packed_model.published_tensors(model, adapters)
        mixture = self.model.num_experts > 0  # transformers joins a layer's experts
        converts = (mixture or bool(self.model.foreign)) and not adapters
        if not (converts or self.model.foreign):  # in the order of the other trainer's files
            lora, table = self._options.lora, parameters.table(self.model)
            rows = lora_config.table(self.model, lora) if adapters and lora else table
            tensors = {name: tensors[name] for row in rows for name in row.names}
        dtype = "float32" if adapters else self._options.publish_dtype
        kind = getattr(torch, dtype)

        def named(part: dict[str, Tensor]) -> dict[str, Tensor]:
            return packed_model.hf_tensors(model, part) if converts else part

        parts = [[*names] for _, names in groupby(tensors, _layer if converts else None)]

        def buckets() -> Iterator[dict[str, np.ndarray]]:
            bucket: dict[str, np.ndarray] = {}
            for names in parts:
                copies = named({name: tensors[name].copied(kind) for name in names})
                for name, tensor in copies.items():
                    if sum(x.nbytes for x in bucket.values()) + tensor.nbytes > BUCKET and bucket:
                        yield bucket
                        bucket = {}
                    bucket[name] = _host(tensor)
            yield bucket

        zero, specs = np.zeros((), dtype), dict[str, np.ndarray]()
        for names in parts:  # in the order of the buckets
            empty = {k: torch.empty(tensors[k].tensor.shape, device="meta") for k in names}
            specs |= {k: np.broadcast_to(zero, x.shape) for k, x in named(empty).items()}
        return Buckets(specs, buckets())

    def _run_dcp(self, save_or_load: Callable, tree: dict[str, Any], path: Path) -> None:
        with warnings.catch_warnings():  # for a single process torch warns each time
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            single, group = self._ranks.count == 1, self._ranks.checkpoint_group
            try:
                save_or_load(tree, checkpoint_id=path, no_dist=single, process_group=group)
            except CheckpointException as error:  # it is no Exception, and hides a full disk
                raise next(iter(error.failures.values()))[0] from None

    # One batch.

    def _put(self, arrays: Any) -> Any:
        return {name: torch.from_numpy(x).to(self._device) for name, x in arrays.items()}

    def _put_rows(self, microbatch: Any) -> Any:
        return packed_model.put(self._ranks.own_rows(microbatch), self._device, self._pictures)

    def _to_host(self, tree: Any) -> Any:
        return _mapped(tree, _host)

    def _cost(self, plan: PackPlan, sizes: np.ndarray) -> float:
        tokens = float(sizes.sum() - plan.shared.sum())  # without padding
        return tokens + self._tree_cost * plan.token_pairs(sizes)

    def _policy(self, state: TorchState) -> Any:
        return state.policy.model

    @torch.no_grad()
    def _logprobs_of(self, policy: Any, batch: Any) -> Tensor:
        if isinstance(policy, OtherAdapters):
            with policy.put() as model:
                return self._logprobs(model, batch)[0]
        return self._logprobs(policy, batch)[0]

    @torch.no_grad()
    def _values_of(self, critic: Learned, batch: Any) -> tuple[Tensor, Tensor]:
        after = self._values(critic.model, batch)
        return packed_model.before(after, batch["segment_ids"]), after

    def _on_flat_axis(self, *arrays: Any) -> tuple:
        return tuple(self._ranks.sum(x) for x in super()._on_flat_axis(*arrays))

    def _scatter(self, flat_F: Tensor, flat_index_BT: Tensor, values_BT: Tensor) -> Tensor:
        size = len(flat_F)
        wide = nn.functional.pad(flat_F, (0, 1))  # one place for all padding
        wide[flat_index_BT.long().clamp(max=size)] = values_BT
        return wide[:size]

    def _prepare(self, state: TorchState, flat: Any, minibatch_of: Any, count: int) -> tuple:
        parts, beta = torch.from_numpy(minibatch_of), torch.tensor(state.kl_coefficient)
        scalars = torch.tensor(state.step), beta.to(self._device)
        return objective.prepare(flat, parts.to(self._device), *scalars, count, self._algorithm)

    def _gather(self, per_token: Any, batch: Any, sums: Any, progress: Any) -> Any:
        gathered = objective.gather(per_token, batch, sums, progress)
        return {**gathered, **{name: batch[name] for name in packed_model.LAYOUT}}

    def _waits(self, step: int) -> bool:
        return step < self._options.critic_warmup

    @torch.no_grad()
    def _stats(self, state: TorchState, inputs: Any) -> Any:
        return self._ranks.sums(self._loss(state.policy.model, inputs)[1])

    def _precision(self) -> Any:
        """Return the autocast context of products; parameters stay float32."""
        if self._options.compute_dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device, getattr(torch, self._options.compute_dtype))

    def _logprobs(self, model: Any, batch: dict) -> tuple[Tensor, Tensor]:
        o, algorithm = self._options, self._algorithm
        score = partial(
            packed_model.logprobs, model, batch, temperature=o.temperature, chunk=o.chunk or CHUNK,
            entropy_gradient=algorithm.entropy_coefficient > 0 or bool(algorithm.loss_function),
        )  # fmt: skip
        with self._precision():
            return self._ranks.within(model, score)

    def _values(self, model: Any, batch: dict) -> Tensor:
        with self._precision():
            return self._ranks.within(model, partial(packed_model.values, model, batch))

    def _loss(self, model: Any, batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
        return objective.loss(
            batch, self._algorithm,
            logprobs=lambda: self._logprobs(model, batch),
            scores=lambda: self._values(model, batch),
        )  # fmt: skip

    def _value_loss(self, model: Any, batch: dict) -> tuple[Tensor, dict[str, Tensor]]:
        before = packed_model.before(self._values(model, batch), batch["segment_ids"])
        return losses.value_loss(before, batch, self._algorithm)

    def _learn(
        self, state: TorchState, batches: list, denominator: Tensor, wait: Any, critic: bool = False
    ) -> tuple[TorchState, dict[str, Any]]:
        """Make one optimizer update with a minibatch; a non-finite norm changes nothing."""
        learned: Any = state.critic if critic else state.policy
        loss = self._value_loss if critic else self._loss
        learned.optimizer.zero_grad(set_to_none=True)
        total: dict[str, Tensor] = {}
        # Autocast caches casts until the outermost context ends. A single process thus casts each
        # weight once an update, not once a microbatch.
        with self._precision() if self._ranks.count == 1 else nullcontext():
            for index, batch in enumerate(batches):
                self._ranks.expect(learned.model, last=index == len(batches) - 1)
                value, stats = loss(learned.model, batch)
                with torch.autocast(self._device, enabled=False):
                    (value / denominator).backward()
                total = {name: x + total.get(name, 0.0) for name, x in stats.items()}
        total = self._ranks.sums(total)
        norm = self._ranks.clip(learned.model, learned.options.clip_norm or float("inf"))
        finite, updates = bool(torch.isfinite(norm)), learned.updates
        if finite and not wait:
            for group in learned.optimizer.param_groups:
                group["lr"] = float(rate_at(learned.options, learned.total, updates, np))
            if learned.offloaded:
                step_offloaded(learned.optimizer)
            else:
                learned.optimizer.step()
            learned.updates += 1
        applied = {"grad_norm": norm, "skipped_updates": 1.0 - finite, "updates": updates}
        return state, {**total, **applied}

    @torch.no_grad()
    def _end_batch(
        self, state: TorchState, reference_kl: Any, trained: Any, trajectories: Any
    ) -> TorchState:
        o, algorithm = self._options, self._algorithm
        if algorithm.kl_target and not self._waits(state.step):
            old, count = torch.tensor(state.kl_coefficient), torch.tensor(trajectories)
            target, horizon = algorithm.kl_target, algorithm.kl_horizon
            observed = (reference_kl / trained).cpu()
            adapted = kl.adapt(old, observed, count, target=target, horizon=horizon)
            state.kl_coefficient = float(adapted)
        state.step += 1
        if state.reference is not None:
            keep = o.reference_decay
            if o.reference_mode == "copy":
                keep = float(state.step % o.reference_every != 0)
            both = (_trained(policy).values() for policy in (state.reference, state.policy.model))
            for old, new in zip(*both, strict=True):
                old.mul_(keep).add_(new, alpha=1.0 - keep)
        return state


def _new_learner(
    model: Any, options: OptimizerOptions, total: int, offloaded: bool = False
) -> Learned:
    optimizer = make_optimizer(_trained(model).values(), options, offloaded)
    return Learned(model, optimizer, options, total, offloaded=offloaded)


def _trained(policy: Any) -> dict[str, Any]:
    """Return the tensors of a model that are trained, by name; all of a reference's adapters."""
    if isinstance(policy, OtherAdapters):
        return policy.tensors
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def _no_images(name: str) -> bytes:
    raise UserError(
        f"a trajectory has the image {name}, and no directory of images was given; "
        "train on it in the run that stored it"
    )


def _layer(name: str) -> str:
    """Return the prefix of a layer's parameter up to its number; for others the name."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


def _shapes_text(part: Any, name: str = "") -> dict[str, str]:
    """Return the shapes of tensors in nested dicts, or in a checkpoint's description."""
    if isinstance(part, Mapping):
        inner = (_shapes_text(x, f"{name}.{key}".lstrip(".")) for key, x in part.items())
        return {key: text for texts in inner for key, text in texts.items()}
    shape: Any = getattr(part, "shape", getattr(part, "size", None))
    is_number = shape is None or callable(shape) or not shape
    return {name: "a number" if is_number else str(list(shape))}


def _host(tensor: Tensor) -> np.ndarray:
    tensor = tensor.cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _mapped(part: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to each tensor in nested dicts and sequences."""
    if isinstance(part, Mapping):
        return {key: _mapped(x, function) for key, x in part.items()}
    if isinstance(part, tuple | list):
        return [_mapped(x, function) for x in part]
    return function(part.detach()) if isinstance(part, Tensor) else part
