"""The train state of the PyTorch trainer in torch's distributed checkpoints.

Their description, `.metadata`, is a pickle, in which only torch's own classes are allowed.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from rlx.base import UserError

METADATA = ".metadata"
_CLASSES = {
    metadata.__name__: {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch": {"Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # of Python 3.13
}  # fmt: skip


class _Limited(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise UserError(
                f"{METADATA} of a checkpoint names {module}.{name}, which rlx never writes; do not "
                "trust this checkpoint"
            )
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """torch's reader, restricted to descriptions of torch's own classes."""

    _known: metadata.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the description; UserError if it is missing or unreadable."""
        if self._known is not None:
            return self._known
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                _Limited(file).load()
        except FileNotFoundError:
            text = f"{path.parent} was not written by trainer=torch; use the other trainer"
            raise UserError(text) from None
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} cannot be read: {error}; take another checkpoint") from error
        self._known = super().read_metadata(*args, **kwargs)
        return self._known


class Planner(DefaultLoadPlanner):
    """torch's planner, which reads numbers without unpickling arbitrary objects."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Put a number into the state dict."""
        name = read_item.dest_index.fqn
        *path, last = self.mappings[name]
        node: Any = self.original_state_dict  # nested dicts, or lists
        for key in path:
            node = node[key]
        node[last] = torch.load(value, weights_only=True)


class TorchCheckpoint(Mapping[str, Any]):
    """Tensors and numbers of a checkpoint by name, read when accessed; UserError if unreadable."""

    def __init__(self, path: Path):
        self._reader = Reader(path)
        self._found = self._reader.read_metadata().state_dict_metadata

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        return tuple(getattr(self._found[name], "size", ()))

    def __getitem__(self, name: str) -> Any:
        entry, tree = self._found[name], dict[str, Any]({name: 0})
        if isinstance(entry, metadata.TensorStorageMetadata):
            tree = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        with warnings.catch_warnings():  # for a single process torch warns each time
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tree, storage_reader=self._reader, planner=Planner(), no_dist=True)
        value = tree[name]
        return value.numpy() if isinstance(value, torch.Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
