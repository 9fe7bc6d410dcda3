#!/bin/sh
# A ranker in a container: serve.sh with the file that lists the shards.
#
#   RECINFER_SHARDS   path of shards.json (/etc/recinfer/shards.json); the rest as in serve.sh
set -eu
exec "$(dirname "$0")/serve.sh" --shards "${RECINFER_SHARDS:-/etc/recinfer/shards.json}" "$@"
