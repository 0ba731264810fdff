"""Writes the Python code of the gRPC protocols: `python scripts/gen_proto.py`.

It makes the gen/ beside each proto/ of `PACKAGES` from that folder's files. The result is committed, so that installing
the package needs no compiler; a test compiles again and compares. Written code demands a grpcio at least as new as its
compiler, so this refuses a compiler newer than the oldest grpcio that pyproject.toml allows.
"""

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve/serve/gen", "jaxserve/kv/gen")


def generate(target_root: Path, package: str) -> list[Path]:
    """Compiles the .proto files of a package into `target_root`/`package` and returns the files it wrote.

    The sources are given to the compiler under the path of the generated package: the import statements that it
    writes then name that package, and nothing has to change `sys.path`. Raises RuntimeError when the compiler refuses.
    """
    import grpc_tools  # the `dev` extra; imported here so that the version check needs no compiler
    from grpc_tools import protoc

    package_dir = target_root / package
    package_dir.mkdir(parents=True, exist_ok=True)
    proto_dir = (ROOT / package).parent / "proto"
    sources = sorted(proto_dir.glob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{package}={proto_dir}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={target_root}",
            f"--pyi_out={target_root}",
            f"--grpc_python_out={target_root}",
            *(f"{package}/{source.name}" for source in sources),
        ]
    )
    if code != 0:
        raise RuntimeError(f"protoc ended with {code}; its messages are above")
    suffixes = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    return [package_dir / f"{source.stem}{suffix}" for source in sources for suffix in suffixes]


def oldest_allowed(package: str) -> tuple[int, ...]:
    """The lower bound that pyproject.toml sets for `package`."""
    found = re.search(rf'"{re.escape(package)}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None, f"pyproject.toml has no lower bound for {package}"
    return parse_version(found.group(1))


def parse_version(text: str) -> tuple[int, ...]:
    """`1.76` -> (1, 76, 0)."""
    parts = [int(p) for p in text.split(".")[:3]]
    return tuple(parts + [0] * (3 - len(parts)))


def main() -> int:
    argparse.ArgumentParser(description="Writes the Python code of the gRPC protocols.").parse_args()
    compiler = importlib.metadata.version("grpcio-tools")
    if parse_version(compiler) > oldest_allowed("grpcio"):
        wanted = ".".join(map(str, oldest_allowed("grpcio")))
        print(
            f"grpcio-tools {compiler} writes code that demands grpcio {compiler}, but pyproject.toml allows {wanted}. "
            f"Run this in an environment with grpcio-tools=={wanted}, or raise the bounds of grpcio and protobuf.",
            file=sys.stderr,
        )
        return 2
    for package in PACKAGES:
        for path in generate(ROOT, package):
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
