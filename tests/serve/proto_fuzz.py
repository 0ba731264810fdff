"""Messages that nobody would send on purpose, always the same ones for the same seed.

Three kinds: fields of the right type with values at the edges, valid messages with damaged bytes, and plain noise. Most
of those end at the first check. `parsing_messages` are such that all parse and most get through: likely values, with
one or two at the edges.
"""

import random
from typing import Any, NamedTuple

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
_LIKELY: dict[str, tuple[int | float | str | bytes | bool, ...]] = {  # values of fields, by name, that are often right
    "text": ("a", "ab", "Once upon a time", "ё🙂", "</s>", "a", "b", "c", ""),
    "role": ("user", "assistant", "system"),
    "content": ("a", "hello", "<|chat|>", ""),
    "ids": (1, 2, 7, 97, 98),
    "token_ids": (1, 2, 7, 97, 98),
    "allowed_token_ids": (1, 2, 97),
    "n": (1, 1, 2, 3),
    "temperature": (0.0, 0.5, 1.0, 100.0),
    "top_k": (-1, 0, 1, 5),
    "top_p": (1.0, 0.5, 1e-6),
    "min_p": (0.0, 0.5, 1.0),
    "presence_penalty": (0.0, 2.0, -2.0),
    "frequency_penalty": (0.0, 2.0, -2.0),
    "repetition_penalty": (1.0, 1.5, 0.01),
    "logit_bias": (0.0, 100.0, -100.0),
    "min_tokens": (0, 1, 2),
    "max_tokens": (1, 2, 3, 17),
    "stop": ("a", "b", "bc"),
    "bad_words": ("a", "b"),
    "stop_token_ids": (1, 97),
    "seed": (0, 1, 2**31),
    "logprobs": (0, 1, 20),
    "prompt_logprobs": (0, 1, 20),
    "truncate_prompt_tokens": (1, 5, 17),
    "json_schema": ('{"type": "object"}', '{"type": "integer"}', '{"enum": ["a", "b"]}', "{}"),
    "regex": ("[a-c]{1,5}", "a|b", "(a+b)*"),
    "texts": ("a", "b", "ab"),
    "grammar": ('start: "a" | "b"', 'start: "a" start?'),
    "request_id": ("", "", "", "r1", "r2"),
    "request_ids": ("r1", "r2", "none"),
    "priority": (0,),
    "cache_salt": ("", "a"),
    "tenant": ("", "a", "b"),
    "chunk_tokens": (0, 1, 5),
    "timeout_s": (100.0, 1000.0),
    "text_len": (0, 1),
    "finished": (False, False, True),
    "reason": (0, 1, 2),
    "age_s": (0.0, 1.0),
    "ttft_target_s": (1.0,),
    "tpot_target_s": (0.1,),
    "model": ("", "", "", "none"),
}
_SHARES = {  # of messages in which a field is set; of others see `_fill_likely`
    "sampling": 0.95, "messages": 0.98, "role": 0.99, "content": 0.95, "ids": 0.98, "texts": 0.98, "structured": 0.15,
    "resume": 0.1, "pictures": 0.02, "ticket": 0.02,
}  # fmt: skip


class Fuzzed(NamedTuple):
    method: str
    body: bytes


def fuzzed_messages(count: int, seed: int) -> list[Fuzzed]:
    random_ = random.Random(seed)
    return [_one(random_) for _ in range(count)]


def parsing_messages(count: int, seed: int) -> list[Fuzzed]:
    """Messages that the server can read, and of which many are right in all fields but one or two."""
    random_ = random.Random(seed)
    found = []
    for _ in range(count):
        (method,) = random_.choices(list(METHODS), _WEIGHTS)
        message = METHODS[method]()
        edges = 0.03 * random_.choice((0, 0, 1, 4))  # share of values that are not the likely ones
        _fill_likely(message, random_, edges)
        found.append(Fuzzed(method, message.SerializeToString()))
    return found


def _fill_likely(message: Message, random_: random.Random, edges: float) -> None:
    """Sets some fields; of a `oneof` one."""
    one_of = {each.name: random_.choice(each.fields).name for each in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        group = field.containing_oneof
        alone = group is None or len(group.fields) == 1  # that of an optional field has no other
        if not alone and one_of[group.name] != field.name:
            continue
        share = _SHARES.get(field.name, 0.12 if alone and message.DESCRIPTOR.name == "SamplingParams" else 0.4)
        if alone and random_.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            ids = random_.choices(_INTS[:6], k=random_.randrange(4))
            getattr(message, field.name).update({number: _likely(field, random_, edges) for number in ids})
        elif field.is_repeated:
            for _ in range(random_.choice((1, 1, 2, 3))):
                if field.message_type is not None:
                    _fill_likely(getattr(message, field.name).add(), random_, edges)
                else:
                    getattr(message, field.name).append(_likely(field, random_, edges))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _fill_likely(getattr(message, field.name), random_, edges)
        else:
            setattr(message, field.name, _likely(field, random_, edges))


def _likely(field: FieldDescriptor, random_: random.Random, edges: float) -> Any:
    values = _LIKELY.get(field.name)
    return random_.choice(values) if values is not None and random_.random() > edges else _value(field, random_)


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
