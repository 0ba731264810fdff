"""The committed protocol code is what the compiler writes, and loads with the versions that we allow."""

import ast
import re
from pathlib import Path

import gen_proto
import pytest


def _descriptor(path: Path) -> bytes:
    """The serialized file descriptor: all of the protocol, whatever version wrote the file."""
    found = re.search(r"AddSerializedFile\((b'.*')\)\n", path.read_text())
    assert found is not None, f"{path} has no descriptor"
    return ast.literal_eval(found.group(1))


def _methods(path: Path) -> list[str]:
    return re.findall(r"'(/jaxserve[^']*)'", path.read_text())


def _stamp(path: Path) -> tuple[int, ...]:
    found = re.search(r"GENERATED_VERSION = '([\d.]+)'|Protobuf Python Version: ([\d.]+)", path.read_text())
    assert found is not None, f"{path} has no version"
    return gen_proto.parse_version(found.group(1) or found.group(2))


@pytest.mark.parametrize("package", gen_proto.PACKAGES)
def test_compiling_again_gives_the_committed_code(tmp_path: Path, package: str) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools (extra `dev`) is not installed")
    fresh, gen = gen_proto.generate(tmp_path, package), gen_proto.ROOT / package
    assert {p.name for p in fresh} == {p.name for p in gen.iterdir() if "_pb2" in p.name and p.is_file()}
    for path in fresh:
        committed = gen / path.name
        if path.name.endswith("_pb2.py"):
            assert _descriptor(path) == _descriptor(committed), "run scripts/gen_proto.py"
        if path.name.endswith("_grpc.py"):
            assert _methods(path) == _methods(committed), "run scripts/gen_proto.py"
            if _stamp(path) == _stamp(committed):
                assert path.read_text() == committed.read_text()


@pytest.mark.parametrize("package", gen_proto.PACKAGES)
def test_the_code_loads_with_the_oldest_versions_that_we_allow(package: str) -> None:
    grpc_file = next((gen_proto.ROOT / package).glob("*_pb2_grpc.py"))  # one compiler has written all
    messages_file = next((gen_proto.ROOT / package).glob("*_pb2.py"))
    assert _stamp(grpc_file) <= gen_proto.oldest_allowed("grpcio")
    assert _stamp(messages_file) <= gen_proto.oldest_allowed("protobuf")
