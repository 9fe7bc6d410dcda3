#!/bin/sh
# A server of one process in a container; further arguments go to `recinfer serve`.
#
#   RECINFER_ARCHIVE        folder of the archive, as in /models/ctr/1; or
#   RECINFER_MODEL_STORE    folder of <model>/<version> archives
#   RECINFER_HOST           address to listen on (0.0.0.0, which needs a token)
#   RECINFER_PORT           of gRPC (50051)
#   RECINFER_METRICS_PORT   of /metrics and the status page (9100)
#   RECINFER_TOKEN_FILE     file with the token of all calls; or RECINFER_TOKEN, which recinfer reads itself
set -eu
[ -n "${RECINFER_ARCHIVE:-}${RECINFER_MODEL_STORE:-}" ] || {
    echo "set RECINFER_ARCHIVE (an archive's folder) or RECINFER_MODEL_STORE (a folder of <model>/<version>)" >&2
    exit 2
}
# The system discards signals to process 1 of a container that has no handler yet, as an interpreter that starts. An init
# passes them on.
init=
if [ $$ -eq 1 ] && command -v tini >/dev/null; then init="tini --"; fi
# shellcheck disable=SC2086
exec $init recinfer serve ${RECINFER_ARCHIVE:+"$RECINFER_ARCHIVE"} \
    ${RECINFER_MODEL_STORE:+--model-store "$RECINFER_MODEL_STORE"} \
    --host "${RECINFER_HOST:-0.0.0.0}" --port "${RECINFER_PORT:-50051}" \
    --metrics-port "${RECINFER_METRICS_PORT:-9100}" \
    ${RECINFER_TOKEN_FILE:+--token-file "$RECINFER_TOKEN_FILE"} --log-json "$@"
