"""Images in rows, messages and prompts.

    a file, bytes, a data URI ─▶ `image_part`: {"type": "image", "image": "image:NAME"} ─▶ chat
    template ─▶ text with placeholders ─▶ `ImagePrompts.expanded`, by the model's own processor

NAME is that of the run's `ImageStore`. Files named by a row stay where they are until it is drawn.
"""

import base64
import binascii
import io
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlx.base import UserError, explained
from rlx.system import image_store
from rlx.system.image_store import ImageStore

NAME = "image:"  # begins the name of an image in the store
MARK = "<image>"  # where a text has an image of the row's column
_MAGIC = re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*", re.DOTALL)
_DATA = re.compile(r"data:[\w/+.-]*;base64,(.*)", re.DOTALL)
IN_TEXT = re.compile(r"(data:image[\w/+.-]*;base64,[\w+/]+={0,2})")  # an image in a tool's output
_AROUND = "@@IMAGE@@"  # to find what a chat template writes for an image
_SECONDS = 30.0  # for an image from the network
Part = Mapping[str, Any]


def data_uri(value: Any) -> str | None:
    """Return an image's bytes, or Pillow's picture, as a data URI; None for other values."""
    if hasattr(value, "save") and hasattr(value, "convert"):  # a picture of Pillow
        file = io.BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    if not isinstance(value, bytes) or not _MAGIC.match(value):
        return None
    return "data:image;base64," + base64.b64encode(value).decode()


def source_of(part: Part) -> Any:
    """Return an image in the forms of data sets and APIs: a text or bytes; None if it is none.

    The forms are those of transformers, OpenAI's chat and responses, and Anthropic's messages.
    """
    image = part.get("image", part.get("image_url", part.get("url", part.get("path"))))
    source = part.get("source")
    if isinstance(source, Mapping):
        kind = source.get("type")
        image = f"data:image;base64,{source.get('data')}" if kind == "base64" else source.get("url")
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("url") or image.get("path")
    return image


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Return the parts of messages' contents that are images, in order."""
    parts = (m["content"] for m in messages if isinstance(m.get("content"), list))
    return [part for content in parts for part in content if is_image(part)]


def image_part(
    part: Part,
    store: ImageStore,
    folder: Path | None = None,  # of paths that are not absolute; None: files are refused
    hosts: Collection[str] = (),  # from which images are fetched
) -> dict[str, str]:
    """Return a part with an image by its name in the store, or by its file.

    UserError for no image, or one that cannot be read, is too large, or is not allowed here.
    """
    source = source_of(part)
    if isinstance(source, str) and source.startswith(NAME) and folder:
        return {"type": "image", "image": source}
    if isinstance(source, str) and not (match := _DATA.fullmatch(source)):
        if re.match(r"https?:", source):
            return _store_picture(_fetch(source, hosts), store)
        if folder is None:
            raise UserError("an image must be a data URI with base64; files are not read here")
        path = folder / source.removeprefix("file://")
        if not path.is_file():
            raise UserError(f"no image {path}; correct the path, which begins at {folder}")
        return {"type": "image", "image": str(path)}
    if isinstance(source, str) and match:
        try:
            source = base64.b64decode(match[1], validate=True)
        except binascii.Error as error:
            raise UserError(f"an image's base64 is damaged ({error}); encode it again") from None
    if not isinstance(source, bytes):
        raise UserError(f"an image must be bytes, a path or a data URI, got {part!s:.80}")
    return _store_picture(source, store)


def _store_picture(data: bytes, store: ImageStore) -> dict[str, str]:
    try:
        image_store.open_picture(data)
    except ValueError as error:
        raise UserError(str(error)) from None
    return {"type": "image", "image": NAME + store.put(data)}


def _fetch(url: str, hosts: Collection[str]) -> bytes:
    import urllib.parse
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """Refuse: another host may not be allowed."""

    host = urllib.parse.urlsplit(url).hostname or ""
    if host not in hosts:
        raise UserError(f"an image is at {host}, which data.image_hosts does not name; add it")
    try:
        with urllib.request.build_opener(NoRedirects).open(url, timeout=_SECONDS) as reply:
            return reply.read(image_store.MOST_BYTES + 1)
    except OSError as error:  # URLError is one
        raise UserError(f"cannot fetch the image {url:.200} ({error}); check the address") from None


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a data set's rows."""

    store: ImageStore
    column: str = ""  # of a row's images, which its question gets; "": none
    hosts: Collection[str] = ()  # from which images may be fetched

    def put(self, parts: Sequence[Part], folder: Path, what: str) -> list[Part]:
        """Return a content's parts, its images as of `image_part`; UserError shows `what`.

        KeyError or TypeError for a part that is neither a text nor an image.
        """
        try:
            return [
                image_part(part, self.store, folder, self.hosts) if is_image(part)
                else {"type": "text", "text": "" + part["text"]}
                for part in parts
            ]  # fmt: skip
        except UserError as error:
            raise UserError(f"{what}: {error}") from None


def with_column(question: Any, images: Any, what: str) -> list[dict[str, Any]]:
    """Return messages with a row's images where the texts have MARK, else before the first text."""
    items = list(images) if isinstance(images, list | tuple) else [images]
    parts = [image if is_image(image) else {"type": "image", "image": image} for image in items]
    messages = [dict(m) for m in question] if isinstance(question, list) else [
        {"role": "user", "content": question}
    ]  # fmt: skip
    pieces = [_pieces(message.get("content")) for message in messages]
    marks = sum(content.count(MARK) for content in pieces)
    if not marks:
        first = [at for at, message in enumerate(messages) if message.get("role") == "user"][:1]
        for at in first:
            pieces[at], marks = [MARK] * len(parts) + pieces[at], len(parts)
    if marks != len(parts):
        raise UserError(f"{what} has {marks} {MARK} and the row {len(parts)} images; make them fit")
    left = iter(parts)
    for message, content in zip(messages, pieces, strict=True):
        message["content"] = [next(left) if piece == MARK else piece for piece in content]
    return messages


def _pieces(content: Any) -> list[Any]:
    """Return the parts of a content, MARK for each image that it leaves to the row's column."""
    if isinstance(content, list):
        return [MARK if is_image(p) and source_of(p) is None else p for p in content]
    texts = filter(None, re.split(f"({MARK})", content) if isinstance(content, str) else ())
    return [text if text == MARK else {"type": "text", "text": text} for text in texts]


class ImagePrompts:
    """The images of prompts, and their placeholders, which a model's processor expands.

    UserError if the model's `directory` has no processor that can be loaded.
    """

    def __init__(self, directory: Path, tokenizer: Any, store: ImageStore):
        from transformers import AutoProcessor

        names = ("processor_config.json", "preprocessor_config.json")
        if not any((directory / name).exists() for name in names):
            problem = f"no processor_config.json in {directory}"
            raise UserError(f"{problem}; copy the model's files there")
        try:
            self._processor = AutoProcessor.from_pretrained(directory, trust_remote_code=False)
        except Exception as error:  # of many kinds: damaged files, packages that are missing
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"the processor in {directory} cannot be loaded: {reason}") from error
        self.store = store
        self._processor.tokenizer = self._texts = _Texts(tokenizer)
        self._lock = threading.Lock()  # of these, which a gateway uses in several threads
        self._size = lru_cache(65536)(lambda name: image_store.open_picture(store.get(name)).size)
        self._for_sizes = lru_cache(4096)(self._expanded)

    def names(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """Return the names of the images in messages, after putting their files into the store."""
        names = []
        for part in images_in(messages):
            source = part["image"]
            if not source.startswith(NAME):
                with explained(f"cannot read the image {source}", "correct its path"):
                    source = _store_picture(Path(source).read_bytes(), self.store)["image"]
            names.append(source.removeprefix(NAME))
        return tuple(names)

    def shown(self, uri: str) -> tuple[str, tuple[str, ...]]:
        """Return the placeholders of an image that a tool gave, and its name; raises UserError."""
        part = image_part({"image": uri}, self.store)
        parts = [{"type": "text", "text": _AROUND}, part, {"type": "text", "text": _AROUND}]
        text = self._texts.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        names = self.names([{"content": [part]}])
        return self.expanded(text.split(_AROUND)[1].strip(), names), names

    def expanded(self, text: str, names: tuple[str, ...]) -> str:
        """Return a rendered text with each placeholder as often as the processor repeats it."""
        try:
            return self._for_sizes(text, tuple(map(self._size, names)))
        except ValueError as error:  # an image is damaged
            raise UserError(str(error)) from None

    def _expanded(self, text: str, sizes: tuple[tuple[int, int], ...]) -> str:
        # Processors look at the sizes only.
        pictures = [image_store.blank(size) for size in sizes]
        try:
            with self._lock:
                self._processor(text=[text], images=[pictures], return_tensors="np")
                return self._texts.last
        except Exception as error:  # of many kinds, by family
            problem = f"the processor refuses a prompt with {len(sizes)} images ({error!s:.200})"
            remedy = "check that its chat template writes a placeholder for each"
            raise UserError(f"{problem}; {remedy}") from error


class _Texts:
    """A processor's tokenizer, which keeps the text that it got last."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self.last = tokenizer, ""

    def __call__(self, text: Any, **options: Any) -> Any:
        self.last = text if isinstance(text, str) else text[0]
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
