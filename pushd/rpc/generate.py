"""Generates `pushd/rpc/gen` from `protos/`: `python -m pushd.rpc.generate [--check]`.

Runs protoc (grpcio-tools, a development dependency) with the Python, stub and purerpc plugins, then rewrites what
would collide with other packages of the same process:

- absolute imports (`from grpc.health.v1 import ...`) become imports from `pushd.rpc.gen`;
- descriptors go to a pool of our own instead of the process-wide one, where grpcio-health-checking and others register
  the same symbols under other file names, which protobuf refuses;
- `import purerpc` becomes an import through `pushd.rpc._purerpc`.

purerpc's plugin writes no types, so a stub is written here for every service. With `--check` nothing is written and the
exit code says whether the generated code is current.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GEN = Path(__file__).resolve().parent / "gen"
PACKAGE = "pushd.rpc.gen"

# The plugin does not claim to know `optional` in proto3, which concerns messages and not services. Two encoded
# responses written one after the other are their union, so the claim can follow what the plugin wrote.
_PLUGIN = f"""#!{sys.executable}
import sys
from google.protobuf.compiler.plugin_pb2 import CodeGeneratorResponse
from pushd.rpc._purerpc import purerpc
from purerpc.protoc_plugin import plugin
plugin.main()
claim = CodeGeneratorResponse(supported_features=CodeGeneratorResponse.FEATURE_PROTO3_OPTIONAL)
sys.stdout.buffer.write(claim.SerializeToString())
"""

_POOL = '''"""The descriptor pool of the generated code, apart from protobuf's process-wide one."""

from google.protobuf import any_pb2
from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
POOL.AddSerializedFile(any_pb2.DESCRIPTOR.serialized_pb)
'''


def generate(into: Path) -> None:
    """Writes the whole package into the empty folder `into`.

    Raises:
        SystemExit: protoc refused a file; its own message is on standard error.
    """
    files = sorted(PROTOS.rglob("*.proto"))
    descriptors = _run_protoc(into, files)
    packages = {file.parent.relative_to(PROTOS) for file in files}
    folders = {folder for package in packages for folder in (package, *package.parents)}
    for path in sorted(into.rglob("*.py*")):
        path.write_text(_rewrite(path.read_text(), packages))
    for file in descriptors.file:
        if file.service:
            stub = into / file.name.replace(".proto", "_grpc.pyi")
            stub.write_text(_service_stub(file))
        else:
            (into / file.name.replace(".proto", "_grpc.py")).unlink(missing_ok=True)
    for folder in folders:
        (into / folder / "__init__.py").touch()
    (into / "__init__.py").write_text('"""Generated from protos/ by `just protos`; do not edit."""\n')
    (into / "_pool.py").write_text(_POOL)


def _run_protoc(into: Path, files: list[Path]) -> descriptor_pb2.FileDescriptorSet:
    import grpc_tools  # here, because it is a development dependency

    with tempfile.TemporaryDirectory() as scratch:
        plugin = Path(scratch, "protoc-gen-purerpc")
        plugin.write_text(_PLUGIN)
        plugin.chmod(0o700)
        described = Path(scratch, "descriptors")
        command = [
            *(sys.executable, "-m", "grpc_tools.protoc"),
            *(f"-I{PROTOS}", f"-I{Path(grpc_tools.__path__[0], '_proto')}"),
            f"--plugin=protoc-gen-purerpc={plugin}",
            *(f"--{kind}_out={into}" for kind in ("python", "pyi", "purerpc")),
            f"--descriptor_set_out={described}",
            *map(str, files),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the plugin imports pushd, installed or not
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
            raise SystemExit("protoc failed")
        return descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes())


def _rewrite(source: str, packages: set[Path]) -> str:
    source = re.sub(r"^import purerpc$", "from pushd.rpc._purerpc import purerpc", source, flags=re.M)
    source = source.replace("_descriptor_pool.Default()", "_pool.POOL")
    source = re.sub(
        r"^from google\.protobuf import descriptor_pool as _descriptor_pool$",
        f"from {PACKAGE} import _pool",
        source,
        flags=re.M,
    )
    for package in packages:
        dotted = ".".join(package.parts)
        source = re.sub(rf"^from {re.escape(dotted)} import", f"from {PACKAGE}.{dotted} import", source, flags=re.M)
        source = re.sub(
            rf"^import {re.escape(dotted)}\.(\w+) as", rf"from {PACKAGE}.{dotted} import \1 as", source, flags=re.M
        )
    return source


def _service_stub(file: descriptor_pb2.FileDescriptorProto) -> str:
    """Types for one `_grpc.py`: what a servicer implements, with its messages."""
    module = Path(file.name).stem + "_pb2"
    lines = [
        "from collections.abc import AsyncIterator",
        "from typing import Any",
        "",
        f"from {PACKAGE}.{'.'.join(Path(file.name).parent.parts)} import {module}",
    ]
    for service in file.service:
        lines += ["", f"class {service.name}Servicer:", "    @property", "    def service(self) -> Any: ..."]
        for method in service.method:
            plural = "s" if method.client_streaming else ""
            request = f"{module}.{method.input_type.rsplit('.', 1)[1]}"
            response = f"{module}.{method.output_type.rsplit('.', 1)[1]}"
            if method.client_streaming:
                request = f"AsyncIterator[{request}]"
            # A streaming answer is an async generator, whose type is that of a plain function.
            prefix, response = ("", f"AsyncIterator[{response}]") if method.server_streaming else ("async ", response)
            lines.append(f"    {prefix}def {method.name}(self, input_message{plural}: {request}) -> {response}: ...")
        lines += ["", f"class {service.name}Stub:", "    def __init__(self, channel: Any) -> None: ..."]
        lines += [f"    {method.name}: Any" for method in service.method]
    return "\n".join(lines) + "\n"


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def main() -> int:
    """Generates, or with `--check` compares; returns the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, present = _contents(Path(scratch)), _contents(GEN)
    if "--check" in sys.argv[1:]:
        stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
        if stale:
            sys.stderr.write("generated code is out of date, run `just protos`: " + ", ".join(stale) + "\n")
        return 1 if stale else 0
    for name in present.keys() - fresh.keys():
        (GEN / name).unlink()
    for name, content in fresh.items():
        (GEN / name).parent.mkdir(parents=True, exist_ok=True)
        (GEN / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
