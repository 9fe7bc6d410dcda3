#!/bin/sh
# A shard server in a container: serve.sh with the ranks it holds.
#
#   RECINFER_RANKS   as in 0,1 or 0-3; the rest as in serve.sh
set -eu
: "${RECINFER_RANKS:?set it to the ranks that this shard server holds, as in 0,1}"
exec "$(dirname "$0")/serve.sh" --ranks "$RECINFER_RANKS" "$@"
