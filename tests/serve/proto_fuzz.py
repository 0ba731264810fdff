"""Messages that nobody would send on purpose, always the same ones for the same seed.

Three kinds: fields of the right type with values at the edges, valid messages with damaged bytes, and plain noise.
"""

import random
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import EncodeError, Message

from jaxserve.serve.gen import inference_pb2 as pb

METHODS: dict[str, type[Message]] = {
    "Generate": pb.GenerateRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "GetModel": pb.GetModelRequest,
    "GetLoad": pb.GetLoadRequest,
    "Abort": pb.AbortRequest,
}
_WEIGHTS = (20, 4, 4, 1, 1, 2)
_INTS = (0, 1, 2, 3, 5, 17, 97, 255, 256, 257, 258, 259, 1025, -1, -2, 2**31 - 1, -(2**31))
_DOUBLES = (0.0, 1.0, 0.5, -0.0, -1.0, 2.0, 1e-12, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 101.0)
_TEXTS = (
    "", "a", "ab", "\0", "<|chat|>", "</s>", "ё", "🙂" * 3, "x" * 300, "{{ 7 * 7 }}", '{"type": "object"}', "(", "[a-",
    "start:", "user", "\n\n", "a" * 5000, '{"type":' * 40,
)  # fmt: skip


class Fuzzed(NamedTuple):
    method: str
    body: bytes


def fuzzed_messages(count: int, seed: int) -> list[Fuzzed]:
    random_ = random.Random(seed)
    return [_one(random_) for _ in range(count)]


def _one(random_: random.Random) -> Fuzzed:
    (method,) = random_.choices(list(METHODS), _WEIGHTS)
    kind = random_.random()
    if kind < 0.1:
        return Fuzzed(method, random_.randbytes(random_.choice((1, 2, 7, 60, 4000))))
    message = METHODS[method]()
    _fill(message, random_, 0)
    try:
        body = message.SerializeToString()
    except EncodeError:  # a required thing is missing, which proto3 does not have
        body = b""
    if kind < 0.4 and body:
        body = _damage(bytearray(body), random_)
    return Fuzzed(method, body)


def _fill(message: Message, random_: random.Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        # Few at once: else the first wrong one always hides the others.
        if random_.random() > (0.6 if depth == 0 else 0.12 if message.DESCRIPTOR.name == "SamplingParams" else 0.5):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update(
                {random_.choice(_INTS): random_.choice(_DOUBLES) for _ in range(random_.randrange(4))}
            )
        elif field.is_repeated:
            for _ in range(random_.choice((0, 1, 2, 3, 40))):
                if field.message_type is not None:
                    _fill(getattr(message, field.name).add(), random_, depth + 1)
                else:
                    getattr(message, field.name).append(_value(field, random_))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), random_, depth + 1)
        else:
            setattr(message, field.name, _value(field, random_))


def _value(field: FieldDescriptor, random_: random.Random) -> int | float | str | bytes | bool:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return random_.choice((b"", b"", b"", b"", b"x" * 40))  # a server without handoffs refuses any
    if field.type == FieldDescriptor.TYPE_STRING:
        return random_.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return random_.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return random_.choice(_DOUBLES)
    number = random_.choice(_INTS)
    return abs(number) if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else number


def _damage(body: bytearray, random_: random.Random) -> bytes:
    for _ in range(random_.choice((1, 1, 2, 8))):
        place = random_.randrange(len(body))
        what = random_.random()
        if what < 0.5:
            body[place] = random_.randrange(256)
        elif what < 0.75 and len(body) > 1:
            del body[place : place + random_.randrange(1, 9)]
        else:
            body[place:place] = random_.randbytes(random_.randrange(1, 9))
        if not body:
            break
    return bytes(body)
