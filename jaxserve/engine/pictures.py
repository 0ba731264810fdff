"""Pictures on their way into a request: where they stand in a prompt or a chat, and the bytes that a client sent.

A picture comes as bytes, as an open picture of Pillow, or as a `data:` URL. No address is ever followed: a server that
fetched what a client names could be sent to places that the client cannot reach. What the bytes mean is decided by the
model's processor (`vision`), which the engine knows as a `PictureReader`.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxserve.errors import InvalidRequest, JaxserveError, UnsupportedOption
from jaxserve.values.content import Picture, PlacedPicture

T = TypeVar("T")

_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_PARTS = ("image_url", "image")  # of a chat: OpenAI's, and that of processors


class PictureReader(Protocol):
    """`vision.PictureProcessor`, as much of it as a prompt needs. Used by several threads at once."""

    def begin(self) -> Callable[[Any], Picture]:
        """For the pictures of one request, which share a limit of time: returns that of a file's bytes, or of an open
        one. Raises InvalidRequest."""
        ...

    def for_caller(self, has_left: Callable[[], bool], work: Callable[[], T]) -> Callable[[], T]:
        """`work`, to be done on any thread, for a caller that may leave: then decoding in it raises CancelledError."""
        ...

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """The prompt with each placeholder repeated for its picture. Raises InvalidRequest."""
        ...

    def check_count(self, num_pictures: int) -> None:
        """Raises InvalidRequest for more pictures than a request may have."""
        ...


class PictureSource(NamedTuple):
    """A picture as a client gave it. `where`: its place in the request, for errors."""

    where: str
    data: Any


# What a URL of another kind than `data:` means, for doors that have a meaning for one. Gets the URL, returns the bytes.
OpenUrl = Callable[[str], bytes]


def refuse_url(url: str) -> bytes:
    scheme = url.partition(":")[0] if ":" in url[:32] else ""
    raise InvalidRequest(
        f"a picture has a URL of the kind {scheme!r}, but only data: is taken: this server fetches nothing; send "
        "the picture itself, as data:image/png;base64,..."
    )


def split_chat(
    messages: Sequence[Mapping[str, Any]], open_url: OpenUrl = refuse_url, places: Iterable[str] = ()
) -> tuple[Sequence[Mapping[str, Any]], list[PictureSource]]:
    """The messages with {"type": "image"} in the place of each picture, and the pictures in their order.

    A picture is a part {"type": "image_url", "image_url": {"url": URL}} or {"type": "image", "image": PICTURE}.
    `places` are those of the pictures in the request, for errors, where the messages were made of another form; an
    empty one is that in the messages. Messages without a picture are returned as they are, so that a template sees what
    it always saw. Raises InvalidRequest. What else may be wrong with a message is for `text.check_messages` to say.
    """
    sources: list[PictureSource] = []
    named = iter(places)
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, sources
    split: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts, before = [], len(sources)
            for at, part in enumerate(content):
                if isinstance(part, Mapping) and part.get("type") in _PARTS:
                    where = next(named, "") or f"messages[{number}].content[{at}]"
                    sources.append(_source(part, where, open_url))
                    parts.append({"type": "image"})
                else:
                    parts.append(part)
            if len(sources) > before:
                message = {**message, "content": parts}
        split.append(message)
    return split, sources


def _source(part: Mapping[str, Any], where: str, open_url: OpenUrl) -> PictureSource:
    if part["type"] == "image":
        if part.get("image") is None:
            raise InvalidRequest(f"{where} is a picture without 'image', which has its bytes")
        return PictureSource(where, part["image"])
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str):
        raise InvalidRequest(f"{where} is a picture without a URL: it needs image_url: {{url: 'data:image/png;...'}}")
    try:
        return PictureSource(where, _read_data_url(url) if url[:5].lower() == "data:" else open_url(url))
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: {error}") from None  # nothing of the URL goes into a traceback


def _read_data_url(url: str) -> bytes:
    """The bytes of `data:TYPE;base64,DATA` (RFC 2397). Errors repeat nothing of the data."""
    head, comma, data = url.partition(",")
    kind, *parameters = head[5:].split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequest("a data: URL of a picture has the form data:image/png;base64,DATA")
    if kind.strip().lower() not in _TYPES:
        raise InvalidRequest(f"a picture is of the type {kind[:40]!r}; {', '.join(_TYPES)} are taken")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the data of a picture is not valid base64: {error}") from None


def prompt_pictures(data: object) -> list[PictureSource]:
    """The pictures of vLLM's `multi_modal_data`: {"image": PICTURE} or {"image": [PICTURE, ...]}. Raises
    InvalidRequest or UnsupportedOption."""
    if data is None:
        return []
    if not isinstance(data, Mapping) or set(data) - {"image"}:
        found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise UnsupportedOption(f"multi_modal_data has pictures under 'image' and nothing else, got {found}")
    given = data.get("image")
    many = given if isinstance(given, list | tuple) and not isinstance(given, PictureSource) else [given]
    return [
        one if isinstance(one, PictureSource) else PictureSource(f"multi_modal_data.image[{number}]", one)
        for number, one in enumerate(many)
        if one is not None
    ]


def chat_prompt(
    prompt: str | Sequence[int], sources: Sequence[PictureSource]
) -> Mapping[str, object] | str | Sequence[int]:
    """The prompt of a chat, as text or ids (`PromptText.for_engine`), with the pictures of `split_chat`."""
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "multi_modal_data": {"image": list(sources)}} if sources else prompt


def with_pictures(
    reader: PictureReader | None, token_ids: Sequence[int], sources: Sequence[PictureSource]
) -> tuple[tuple[int, ...], tuple[PlacedPicture, ...]]:
    """The prompt with placeholders for all tokens of its pictures, and the pictures; decoding one takes milliseconds.

    Raises InvalidRequest or UnsupportedOption, which name the picture.
    """
    check_takes_pictures(reader, sources)
    if reader is None:
        return tuple(token_ids), ()
    # Without pictures, too: a placeholder that somebody wrote as text is none.
    read = reader.begin()
    expanded, placed = reader.expand(token_ids, [_read(read, source) for source in sources])
    return tuple(expanded), placed


def check_takes_pictures(reader: PictureReader | None, sources: Sequence[PictureSource]) -> None:
    """Raises UnsupportedOption for pictures of a model that takes none, InvalidRequest for too many of them."""
    if not sources:
        return
    if reader is None:
        raise UnsupportedOption(
            f"{sources[0].where} is a picture, but this model takes text only; leave it out, or ask a model that takes "
            "pictures"
        )
    reader.check_count(len(sources))


def _read(read: Callable[[Any], Picture], source: PictureSource) -> Picture:
    data = source.data
    if isinstance(data, Picture):
        return data
    if isinstance(data, bytearray | memoryview):
        data = bytes(data)
    is_open = any(base.__module__.partition(".")[0] == "PIL" for base in type(data).__mro__)
    if not isinstance(data, bytes) and not is_open:
        raise InvalidRequest(
            f"{source.where} is a {type(data).__name__}, but a picture is bytes of a PNG, JPEG, WebP or GIF file, or "
            "an image of Pillow"
        )
    try:
        return read(data)
    except JaxserveError as error:
        raise type(error)(f"{source.where}: {error}") from error
