"""Build hook: generates the gRPC modules and their type stubs next to their .proto files.

Runs for wheels, from a checkout or an sdist, and for editable installs. The repository root is the
include root, so that modules are `rpc.proto...` and don't shadow the package `engine`.
"""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Generates `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi` for each .proto below rpc/proto."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs(Path(self.root))


def generate_stubs(root: Path) -> None:
    """Raises RuntimeError when protoc fails; its own message is on stderr."""
    from grpc_tools import protoc

    protos = [str(p.relative_to(root)) for p in sorted(root.glob("rpc/proto/**/*.proto"))]
    command = [
        "protoc",
        f"--proto_path={root}",
        *(f"--plugin=protoc-gen-{name}={_plugin(name)}" for name in ("mypy", "mypy_grpc")),
        *(f"--{kind}_out={root}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *protos,
    ]
    if protoc.main(command) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(protos)}")


def _plugin(name: str) -> str:
    """Path of a protoc plugin in the build environment, which need not be on PATH."""
    program = f"protoc-gen-{name}"
    found = shutil.which(program, path=sysconfig.get_path("scripts")) or shutil.which(program)
    if found is None:
        raise RuntimeError(f"{program} is not installed; it comes with mypy-protobuf")
    return found


if __name__ == "__main__":
    generate_stubs(Path(__file__).parent)
