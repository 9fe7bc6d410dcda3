"""Whether the server in this container says SERVING: asks grpc.health.v1, exits 0 or 1.

RECINFER_HOST and RECINFER_PORT say where, as for serve.sh; RECINFER_TLS_CA names the authority of a server with TLS, and
RECINFER_TLS_NAME the name in its certificate.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def main() -> int:
    """0 when SERVING; else 1, and stderr says why."""
    host, port = os.environ.get("RECINFER_HOST", "0.0.0.0"), os.environ.get("RECINFER_PORT", "50051")
    target = f"{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"
    authority, name = os.environ.get("RECINFER_TLS_CA"), os.environ.get("RECINFER_TLS_NAME")
    options = [("grpc.enable_http_proxy", 0)]
    if authority:
        options += [("grpc.ssl_target_name_override", name)] if name else []
        credentials = grpc.ssl_channel_credentials(Path(authority).read_bytes())
        channel = grpc.secure_channel(target, credentials, options)
    else:
        channel = grpc.insecure_channel(target, options)
    try:
        with channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
    except grpc.RpcError as error:
        print(f"{target}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if status != "SERVING":
        print(f"{target}: {status}", file=sys.stderr)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
