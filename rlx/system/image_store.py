"""The images of a run, each once, under a name that is a hash of its bytes."""

import base64
import functools
import hashlib
import io
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rlx.base import UserError, explained, packages_of
from rlx.system.jsonl import write_atomically

_NAME = re.compile(r"[0-9a-f]{32}")
MOST_BYTES, MOST_PIXELS = 16 << 20, 1 << 26  # of an image file; a message holds 32 MiB


def name_of(data: bytes) -> str:
    """Return the name of an image: 32 hexadecimal digits of a hash of its file's bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_picture(data: bytes) -> Any:
    """Return an image file's picture in Pillow's mode RGB; ValueError if damaged or too large."""
    with packages_of("vision", "images need Pillow"):
        from PIL import Image
    if len(data) > MOST_BYTES:
        raise ValueError(f"an image has {len(data):,} bytes; shrink it to {MOST_BYTES:,} or fewer")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data)) as picture:
                pixels = picture.width * picture.height
                if pixels <= MOST_PIXELS:  # known before any is decoded
                    return picture.convert("RGB")
        except Exception as error:  # decoders raise errors of many kinds
            why = str(error).partition(" <")[0]  # Pillow names an object in memory
            raise ValueError(f"an image cannot be read ({why}); give PNG or JPEG") from error
    raise ValueError(f"an image has {pixels:,} pixels; shrink it to {MOST_PIXELS:,} or fewer")


def blank(size: tuple[int, int]) -> Any:
    """Return a picture of this width and height."""
    from PIL import Image

    return Image.new("RGB", size)


def thumbnail(data: bytes) -> str:
    """Return an image as a data URI of a PNG of at most 160 × 160 pixels; or ValueError."""
    picture, file = open_picture(data), io.BytesIO()
    picture.thumbnail((160, 160))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


class ImageStore:
    """A directory of image files, as PNG, JPEG or another format that Pillow reads.

    Several threads and processes may use one directory. Without one, files are in a temporary
    directory until `move`.
    """

    def __init__(self, directory: Path | None = None):
        self._given = directory
        self._temporary: tempfile.TemporaryDirectory | None = None

    @functools.cached_property
    def _directory(self) -> Path:
        if self._given:
            return self._given
        self._temporary = tempfile.TemporaryDirectory(prefix="rlx-images-")
        return Path(self._temporary.name)

    def move(self, directory: Path) -> None:
        """Use another directory from now on, with the images so far."""
        old, self._directory = self._temporary, directory
        if old:
            for path in Path(old.name).iterdir():
                self.put(path.read_bytes())
            old.cleanup()

    def put(self, data: bytes) -> str:
        """Keep an image file's bytes; return its name. UserError if it cannot be written."""
        path = self._directory / name_of(data)
        if not path.exists():
            write_atomically(path, data)
        return path.name

    def get(self, name: str) -> bytes:
        """Return the bytes of an image; UserError if it is not here, or `name` is no name."""
        if not _NAME.fullmatch(name):  # a path would lead out of the directory
            raise UserError(f"{name!r:.80} is no image's name; give the one that `put` returned")
        path = self._directory / name
        with explained(f"the image {path} is missing", "keep a run's images with its journal"):
            return path.read_bytes()
