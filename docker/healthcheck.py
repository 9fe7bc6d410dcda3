"""Health check of the server in this container: exits with 0 if grpc.health.v1 reports SERVING, else with 1.

RECINFER_HOST and RECINFER_PORT give the address, as for serve.sh. For TLS, RECINFER_TLS_CA is the certificate authority
and RECINFER_TLS_NAME the name in the server's certificate; RECINFER_TLS_CERT and RECINFER_TLS_KEY are a client
certificate, if the server requires one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 3.0


def main() -> int:
    """Returns 0 if the server is SERVING; else 1, with the reason on stderr."""
    host, port = os.environ.get("RECINFER_HOST", "0.0.0.0"), os.environ.get("RECINFER_PORT", "50051")
    host = "127.0.0.1" if host in ("0.0.0.0", "::", "[::]", "") else host
    target = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    authority, name = os.environ.get("RECINFER_TLS_CA"), os.environ.get("RECINFER_TLS_NAME")
    options = [("grpc.enable_http_proxy", 0)]
    mine = [os.environ.get(f"RECINFER_TLS_{part}") for part in ("KEY", "CERT")]
    if (mine[0] is None) != (mine[1] is None) or (any(mine) and not authority):
        print("set RECINFER_TLS_CA, RECINFER_TLS_CERT and RECINFER_TLS_KEY, or only RECINFER_TLS_CA", file=sys.stderr)
        return 1
    if authority:
        options += [("grpc.ssl_target_name_override", name)] if name else []
        files = [None if path is None else Path(path).read_bytes() for path in (authority, *mine)]
        credentials = grpc.ssl_channel_credentials(*files)
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
