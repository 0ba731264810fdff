"""The bytes of a page: what is refused, and that nothing large or foreign is made of bytes that somebody else wrote."""

import json
import random
import struct
import tracemalloc

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kv import compression
from jaxserve.kv.compression import CodecChoice, CompressionError, ShuffledZstd, shuffle, unshuffle
from jaxserve.kv.names import blob_name, mac, namespace_name, page_key, scope_of
from jaxserve.kv.page_format import (
    MAX_HEADER_BYTES,
    BadPage,
    PageLayout,
    UnknownCodec,
    layout_digest,
    max_sealed_bytes,
    seal,
    unseal,
)

SECRET = b"0123456789abcdef" * 2
LAYOUT = PageLayout(namespace="m", dtype="bfloat16", shape=(2, 2, 16, 4), element_bytes=2, page_bytes=600)
KEY = page_key(b"s" * 16, b"k" * 32)
NAME = blob_name(SECRET, layout_digest(LAYOUT), KEY)


def page(layout: PageLayout = LAYOUT) -> bytes:
    """Numbers near each other, as in a cache, and an odd rest."""
    numbers = np.random.default_rng(0).normal(size=layout.page_bytes // 4).astype(np.float32)
    return numbers.tobytes() + b"x" * (layout.page_bytes % 4)


def sealed_by_hand(header: object, payload: bytes, *, secret: bytes = SECRET, version: int = 2) -> bytes:
    """The format of the docstring, written again from its words."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = struct.pack("<8sHI", b"jaxkv\x00\r\n", version, len(text)) + text + payload
    return body + mac(secret, body)


def header(**changes: object) -> dict[str, object]:
    written = {
        "namespace": namespace_name(SECRET, "m"),
        "dtype": "bfloat16",
        "shape": [2, 2, 16, 4],
        "element_bytes": 2,
        "page_bytes": 600,
        "page": NAME.page,
        "codec": "none",
        "stored": 600,
    }
    return written | changes


@pytest.mark.parametrize("codec", [None, ShuffledZstd()])
@pytest.mark.parametrize("size", [600, 601, 4096])
def test_pages_come_back(codec: ShuffledZstd | None, size: int) -> None:
    layout = PageLayout(namespace="m", dtype="float32", shape=(2, 25), element_bytes=4, page_bytes=size)
    data = page(layout)
    sealed = seal(layout, SECRET, NAME, memoryview(data), codec)
    assert bytes(unseal(layout, SECRET, NAME, sealed, codec)) == data
    assert len(sealed) <= max_sealed_bytes(layout)


def test_noise_is_not_made_longer() -> None:
    data = random.Random(0).randbytes(600)
    assert seal(LAYOUT, SECRET, NAME, memoryview(data), ShuffledZstd()) == seal(LAYOUT, SECRET, NAME, memoryview(data))


def test_the_format_is_that_of_its_description() -> None:
    data = page()
    assert bytes(unseal(LAYOUT, SECRET, NAME, sealed_by_hand(header(), data))) == data


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    sealed = seal(LAYOUT, SECRET, NAME, memoryview(page()))
    for place in [*range(320), *range(320, len(sealed), 17), len(sealed) - 1]:
        changed = bytearray(sealed)
        changed[place] ^= 1 << (place % 8)
        with pytest.raises(BadPage):
            unseal(LAYOUT, SECRET, NAME, bytes(changed))
    for length in [0, 1, 13, 14, 45, 46, 300, len(sealed) - 1]:
        with pytest.raises(BadPage):
            unseal(LAYOUT, SECRET, NAME, sealed[:length])
    with pytest.raises(BadPage):
        unseal(LAYOUT, SECRET, NAME, sealed + b"\0")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"namespace": namespace_name(SECRET, "other model")}, "namespace"),
        ({"dtype": "float16"}, "dtype"),
        ({"shape": [2, 2, 32, 2]}, "shape"),
        ({"shape": None}, "shape"),
        ({"page_bytes": 1 << 60}, "page_bytes"),
        ({"page": blob_name(SECRET, layout_digest(LAYOUT), page_key(b"t" * 16, b"k" * 32)).page}, "page"),
        ({"stored": 599}, "stored"),
        ({"more": 1}, "more"),
    ],
)
def test_genuine_pages_of_others_are_refused(changes: dict[str, object], field: str) -> None:
    """The MAC is right: an owner of the secret wrote these, for another page size, model, or tenant."""
    with pytest.raises(BadPage, match=f"another page: {field} differ"):
        unseal(LAYOUT, SECRET, NAME, sealed_by_hand(header(**changes), page()))


def test_another_secret_and_version() -> None:
    for other in (
        sealed_by_hand(header(), page(), secret=b"f" * 32),
        sealed_by_hand(header(), page(), version=1),
        sealed_by_hand([1], page()),
        sealed_by_hand(b"{" * 100, page()),
        sealed_by_hand(b"[" * MAX_HEADER_BYTES, page()),
        sealed_by_hand({"codec": "none"}, page()),
    ):
        with pytest.raises(BadPage):
            unseal(LAYOUT, SECRET, NAME, other)


def test_a_header_that_claims_to_be_long() -> None:
    body = struct.pack("<8sHI", b"jaxkv\x00\r\n", 2, 1 << 31) + b"{}" + page()
    with pytest.raises(BadPage, match="header would be"):
        unseal(LAYOUT, SECRET, NAME, body + mac(SECRET, body))


@pytest.mark.parametrize(("window_log", "words"), [(17, "decompresses to something else"), (20, "too much memory")])
def test_a_decompression_bomb_takes_one_page_of_memory(window_log: int, words: str) -> None:
    """Even one by an owner of the secret."""
    zstd = ShuffledZstd()
    module = compression._load_zstd()
    compressor = module.ZstdCompressor(options={module.CompressionParameter.window_log: window_log})
    bomb = compressor.compress(bytes(1 << 26)) + compressor.flush()
    assert len(bomb) < 100_000
    layout = PageLayout(namespace="m", dtype="bfloat16", shape=(1,), element_bytes=2, page_bytes=1 << 17)
    named = {"namespace": namespace_name(SECRET, "m"), "page": NAME.page, "codec": "shuffle+zstd", "stored": len(bomb)}
    sealed = sealed_by_hand({**layout.as_json(), **named}, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(BadPage, match=words):
            unseal(layout, SECRET, NAME, sealed, zstd)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_window_that_is_larger_than_a_page_is_refused() -> None:
    """The page itself would fit; its sender asks for 128 MiB to decompress it in."""
    zstd = ShuffledZstd()
    module = compression._load_zstd()
    compressor = module.ZstdCompressor(options={module.CompressionParameter.window_log: 27})
    packed = compressor.compress(shuffle(memoryview(page()), 2)) + compressor.flush()  # its size is not known before
    with pytest.raises(CompressionError, match="zstd cannot read it"):
        zstd.decompress(memoryview(packed), 600, 2)
    for size in (1, 1023, 1024, 1025, (1 << 21) - 3, (1 << 21) + 5):
        data = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
        assert zstd.decompress(memoryview(zstd.compress(memoryview(data), 2)), size, 2) == data


def test_other_bytes_for_the_decompressor() -> None:
    zstd = ShuffledZstd()
    good = zstd.compress(memoryview(page()), 2)
    for packed in (b"", b"nonsense", good[:-1], good + b"more", zstd.compress(memoryview(bytes(599)), 2)):
        with pytest.raises(CompressionError):
            zstd.decompress(memoryview(packed), 600, 2)
    assert zstd.decompress(memoryview(good), 600, 2) == page()


def test_an_unknown_codec_is_not_damage() -> None:
    with pytest.raises(UnknownCodec):
        unseal(LAYOUT, SECRET, NAME, seal(LAYOUT, SECRET, NAME, memoryview(bytes(600)), ShuffledZstd()), None)


def test_shuffling() -> None:
    assert shuffle(memoryview(b"a1b2c3x"), 2) == b"abc123x"
    for size in (0, 1, 7, 64):
        for element in (1, 2, 4, 8):
            data = random.Random(size).randbytes(size)
            assert unshuffle(shuffle(memoryview(data), element), element) == data


def test_compression_pays_on_a_slow_link_only() -> None:
    choice = CodecChoice(ShuffledZstd())
    assert not choice.pays, "nothing is known"
    choice.note_codec(1000, 500, 1000 / 100e6)  # halves pages, at 100 MB/s both ways
    assert not choice.pays, "the link is not known"
    choice.note_link(1000, 1000 / 90e6)  # saves 1000 bytes at 90 MB/s each way: more than the codec takes
    assert choice.pays
    for _ in range(40):
        choice.note_link(1000, 1000 / 110e6)
    assert not choice.pays
    choice.note_codec(1000, 999, 1000 / 100e6)
    for _ in range(40):
        choice.note_link(1000, 1000 / 10e6)
    assert not choice.pays, "pages that do not shrink"


def test_the_choice_measures_as_it_goes() -> None:
    choice = CodecChoice(ShuffledZstd())
    data = memoryview(bytes(1 << 16))
    assert choice.next_codec(data, 2) is None
    choice.note_link(1000, 10.0)
    assert choice.next_codec(data, 2) is choice.codec


def test_a_header_shows_neither_key_nor_namespace() -> None:
    """Whoever reads the store could compare keys with those of prompts that it guesses."""
    namespace = "a model of ours " * 5000
    layout = PageLayout(namespace=namespace, dtype="int8", shape=(1,), element_bytes=1, page_bytes=1)
    name = blob_name(SECRET, layout_digest(layout), KEY)
    sealed = seal(layout, SECRET, name, memoryview(b"x"))
    assert bytes(unseal(layout, SECRET, name, sealed)) == b"x"
    for hidden in (KEY[:16], KEY[16:]):
        assert hidden not in sealed and hidden.hex().encode() not in sealed
    assert b"a model of ours" not in sealed and len(sealed) < 400
    assert namespace_name(SECRET, "m") != namespace_name(b"another secret of the fleet", "m")


def test_names_show_nothing_and_meet_nobody() -> None:
    scope = scope_of(SECRET, "tenant 7")
    key = page_key(scope, b"c" * 32)
    name = blob_name(SECRET, layout_digest(LAYOUT), key)
    other_size = PageLayout(namespace="m", dtype="bfloat16", shape=(1,), element_bytes=2, page_bytes=1200)
    others = [
        blob_name(SECRET, layout_digest(other_size), key),
        blob_name(b"another secret of the fleet", layout_digest(LAYOUT), key),
        blob_name(SECRET, layout_digest(LAYOUT), page_key(scope_of(SECRET, "tenant 8"), b"c" * 32)),
    ]
    assert len({name.page, *(other.page for other in others)}) == 4
    assert others[0].scope == name.scope, "a tenant is flushed in every layout"
    assert len({name.scope, others[1].scope, others[2].scope}) == 3
    assert scope.hex() not in name.scope + name.page
    assert scope_of(SECRET, "é") != scope_of(SECRET, "e\N{COMBINING ACUTE ACCENT}"), "salts are bytes"


def test_impossible_layouts() -> None:
    with pytest.raises(ConfigError, match="needs 200 bytes, but has 199"):
        PageLayout(namespace="", dtype="int8", shape=(100,), element_bytes=2, page_bytes=199)
