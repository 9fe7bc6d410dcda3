"""Writes recinfer/serving/wire/proto/*_pb2* from proto/: ``python tools/gen_proto.py`` (``--check`` only compares).

Needs ``grpcio-tools`` (the ``dev`` extra). The generated code is committed, so installing recinfer needs no compiler.
protoc names Python modules after the .proto's path, but the modules are in ``recinfer.serving.wire.proto``, so the
import between the generated files is rewritten. The Open Inference Protocol gets a separate descriptor pool: its
clients (tritonclient) register the same message names in the default pool, which accepts each name only once per
process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    Path("recinfer/v1/inference.proto"),
    Path("recinfer/v1/admin.proto"),
    Path("recinfer/v1/shards.proto"),
    Path("inference/open_inference.proto"),
)
OWN_POOL = {"open_inference_pb2.py"}
TARGET = ROOT / "recinfer" / "serving" / "wire" / "proto"


def generate(out: Path) -> dict[str, str]:
    """Runs protoc into ``out`` and returns {file name: content} with imports that fit the target package."""
    include = Path(grpc_tools.__file__).parent / "_proto"
    files = {}
    for source in SOURCES:
        args = ["protoc", f"-I{ROOT / 'proto'}", f"-I{include}", str(ROOT / "proto" / source)]
        args += [f"--python_out={out}", f"--pyi_out={out}"]
        if protoc.main(args) != 0:
            raise SystemExit("protoc failed; see its message above")
        package = ".".join(source.parent.parts)
        for path in sorted((out / source.parent).glob("*_pb2*")):
            text = path.read_text().replace(f"from {package} import", "from recinfer.serving.wire.proto import")
            if path.name in OWN_POOL:
                text = text.replace("_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()")
            files[path.name] = text
    return files


def main() -> int:
    """Writes the files, or with ``--check`` returns 1 when a committed one differs from what protoc writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a committed file is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as tmp:
        files = generate(Path(tmp))
    stale = [n for n, text in files.items() if not (TARGET / n).is_file() or (TARGET / n).read_text() != text]
    if check:
        print(f"stale: {', '.join(stale)}; run python tools/gen_proto.py" if stale else "generated code is up to date")
        return 1 if stale else 0
    for name, text in files.items():
        (TARGET / name).write_text(text)
    print(f"wrote {len(files)} files to {TARGET.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
