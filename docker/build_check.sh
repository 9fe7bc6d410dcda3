#!/usr/bin/env bash
# Builds an image with buildah, runs it with podman, and checks what a container has to do. It needs no daemon and no GPU.
#
#   docker/build_check.sh [ARCHIVE]     ARCHIVE: the folder MODEL/VERSION of an archive of two ranks; without one, `recinfer`
#                                       (on the PATH, or in .venv) makes one
#
#   KIND=cuda     the CUDA image; without it, the CPU image and the compose file
#   DRIVER        folder with libcuda.so.1 and libnvidia-ml.so.1 of NVIDIA's driver (Debian's libcuda1 and libnvidia-ml1), which
#                 FBGEMM's CUDA build opens: with it a server of the CUDA image is started, on the CPU
#   PIP_CONF      a pip.conf for the build, which no layer keeps
#   BUILD_ARGS    further arguments of `buildah build`, for example --build-arg TORCH_PIP_ARGS=... or --volume A:B:ro
#   BASE          folder with a root file system that has Python 3.11, for example one that debootstrap made: it stands in for
#                 the images python:3.11 where no registry is reached
#   STORE         folder for the images, which is kept; without one, all is stored in a new folder and removed at the end
#
# One line for each check, then the sizes; the exit status is 1 if a check failed. It is 0 where a tool is missing, with
# the reason. Run it as root, or as a user who may run containers.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "skipped: $*"
    exit 0
}
for tool in buildah podman; do
    command -v "$tool" >/dev/null || skip "$tool is not installed (Debian: apt install buildah podman runc netavark aardvark-dns)"
done

WORK=$(mktemp -d "${TMPDIR:-/tmp}/recinfer-images.XXXXXX")
STORAGE=${STORE:-$WORK/storage}
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
KIND=${KIND:-cpu}
IMAGE=recinfer:$VERSION-$KIND
case $KIND in
cpu) DOCKERFILE=Dockerfile MOST_MB=1500 ;;
cuda) DOCKERFILE=Dockerfile.cuda MOST_MB=8500 ;;
*)
    echo "KIND: got $KIND, expected cpu or cuda" >&2
    exit 2
    ;;
esac
passed=0 failed=0 driver=()

# podman and podman-compose read the same settings. No systemd, no cgroup of a user, and no more open files than this shell has.
export CONTAINERS_CONF=$WORK/containers.conf CONTAINERS_STORAGE_CONF=$WORK/storage.conf
cat >"$CONTAINERS_CONF" <<CONF
[containers]
default_ulimits = ["nofile=1024:$(($(ulimit -Hn) < 65536 ? $(ulimit -Hn) : 65536))", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "$(command -v runc >/dev/null && echo runc || echo crun)"
CONF
cat >"$CONTAINERS_STORAGE_CONF" <<CONF
[storage]
driver = "${STORAGE_DRIVER:-overlay}"
graphroot = "$STORAGE"
runroot = "$WORK/run"
CONF

clean() {
    podman rm --all --force --time 0 >"$WORK/clean" 2>&1 || true
    podman network prune --force >>"$WORK/clean" 2>&1 || true
    if [ -z "${STORE:-}" ]; then
        buildah rm --all >>"$WORK/clean" 2>&1 || true
        podman rmi --all --force >>"$WORK/clean" 2>&1 || true
    fi
    umount "$STORAGE/overlay" 2>/dev/null || true
    rm -rf "$WORK"
}
trap clean EXIT

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$WORK/out" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -20 "$WORK/out" | sed 's/^/        /'
    fi
}

# -- build ---------------------------------------------------------------------------------------------------------------

bases() { sed -n 's/^FROM \(python:[^ ]*\).*/\1/p' "docker/$DOCKERFILE"; }

# The images of Python from a root file system: the slim one is the file system, the other has a compiler too.
stand_in() {
    local made tree name
    made=$(buildah from scratch)
    tree=$(buildah mount "$made")
    cp -a "$BASE/." "$tree/"
    for name in python python3; do ln -sf /usr/bin/python3.11 "$tree/usr/local/bin/$name"; done
    buildah umount "$made" >/dev/null
    buildah config --env PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin "$made"
    buildah commit --quiet "$made" "docker.io/library/$(bases | grep slim)"
    buildah run --isolation chroot "$made" -- sh -c \
        'apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev python3.11-dev'
    buildah commit --quiet --rm "$made" "docker.io/library/$(bases | grep -v slim)"
}

build() {
    local secret=()
    [ -z "${PIP_CONF:-}" ] || secret=(--secret "id=pip,src=$PIP_CONF")
    # shellcheck disable=SC2086
    buildah build --isolation chroot --format docker --pull=false "${secret[@]}" ${BUILD_ARGS:-} --file "docker/$DOCKERFILE" --tag "$IMAGE" .
}

if ! podman image exists "$IMAGE"; then
    if [ -n "${BASE:-}" ]; then
        stand_in >"$WORK/out" 2>&1 || { tail -20 "$WORK/out"; exit 1; }
    else
        for base in $(bases); do
            podman image exists "$base" || timeout 300 podman pull --quiet "docker.io/library/$base" >"$WORK/out" 2>&1 ||
                skip "$base cannot be pulled ($(tail -1 "$WORK/out" | cut -c1-120)); give BASE"
        done
    fi
    check "build docker/$DOCKERFILE" build
fi
podman image exists "$IMAGE" || exit 1
size() { podman image inspect --format '{{.Size}}' "$1" | awk '{printf "%d", $1 / 1e6}'; }
check "the $KIND image is under $MOST_MB MB: $(size "$IMAGE") MB" test "$(size "$IMAGE")" -lt "$MOST_MB"
if [ "$KIND" = cuda ]; then
    check "recinfer --help runs as user 10001 with a read-only root, no capability, no network" podman run --rm --read-only \
        --read-only-tmpfs=false --tmpfs /tmp:size=256m --cap-drop ALL --security-opt no-new-privileges --network none \
        --entrypoint /bin/sh "$IMAGE" -c '[ "$(id -u)" = 10001 ] && ! touch /opt/recinfer/x 2>/dev/null && recinfer --help'
    refuses() { # without the driver
        podman run --rm --timeout 120 --network none --env RECINFER_ARCHIVE=/models --env RECINFER_TOKEN=any-token-of-24-characters \
            "$IMAGE" >"$WORK/refused" 2>&1 || grep "needs NVIDIA's driver" "$WORK/refused"
    }
    check "without NVIDIA's driver a server ends with a sentence that names it" refuses
    if [ -z "${DRIVER:-}" ]; then
        echo "no server was started: FBGEMM's CUDA build needs NVIDIA's driver; give DRIVER"
        echo "$passed passed, $failed failed"
        [ "$failed" -eq 0 ]
        exit
    fi
    driver=(--volume "$(realpath "$DRIVER"):/driver:ro" --env LD_LIBRARY_PATH=/driver)
fi

# -- an archive ----------------------------------------------------------------------------------------------------------

if [ -n "${1:-}" ]; then
    archive=$(realpath "$1")
else
    recinfer=$(command -v recinfer || echo .venv/bin/recinfer)
    [ -x "$recinfer" ] || skip "no recinfer that makes an archive; give ARCHIVE"
    archive=$WORK/store/ctr/1
    "$recinfer" train --format synthetic --limit 2000 --out "$WORK/model.ckpt" >"$WORK/out" 2>&1
    "$recinfer" plan --checkpoint "$WORK/model.ckpt" --world-size 2 --precision int8 --out "$WORK/plan.json" >"$WORK/out" 2>&1
    "$recinfer" export --checkpoint "$WORK/model.ckpt" --plan "$WORK/plan.json" --out "$archive" --name ctr >"$WORK/out" 2>&1
fi
store=$(dirname "$(dirname "$archive")")
inside=/models/${archive#"$store"/}
chmod -R a+rX "$WORK" 2>/dev/null || true
token=$(head -c 24 /dev/urandom | base64 | tr -d '/+=')
echo "$token" >"$WORK/token"
chmod 644 "$WORK/token"

# -- one server ----------------------------------------------------------------------------------------------------------

# The rights of the compose file and of the manifests: a read-only root, no capability, no new privileges.
started() { # NAME ARGUMENTS...
    local name=$1
    shift
    podman run --detach --name "$name" --no-healthcheck --read-only --read-only-tmpfs=false --tmpfs /tmp:size=256m \
        --cap-drop ALL --security-opt no-new-privileges --network none --volume "$store:/models:ro" \
        --env "RECINFER_ARCHIVE=$inside" --env "RECINFER_TOKEN=$token" "${driver[@]}" "$@"
}
healthy() { # NAME
    local end=$((SECONDS + 180))
    until podman exec "$1" python /opt/recinfer/healthcheck.py; do
        [ "$SECONDS" -lt "$end" ] && [ "$(podman inspect --format '{{.State.Running}}' "$1")" = true ] || {
            podman logs "$1" | tail -5
            return 1
        }
        sleep 1
    done
}
answers() { # NAME PORT: with the token; refused without
    podman exec --interactive "$1" python - "$2" <<'PY'
import os, sys
from recinfer.errors import RecinferError
from recinfer.serving.client.client import InferenceClient

target = f"127.0.0.1:{sys.argv[1]}"
with InferenceClient(target, token=os.environ.get("RECINFER_TOKEN") or open("/run/secrets/recinfer_token").read().strip()) as client:
    client.wait_until_ready(60)
    names = list(dict.fromkeys(each.name.split("@")[0] for each in client.get_model().features))
    pooled = client.lookup({name: [[0]] for name in names[:2]})
    print(type(pooled).__name__, names[:2])
try:
    with InferenceClient(target, token="another-token-0123456789", retries=0) as client:
        client.get_model()
except RecinferError as error:
    print("refused:", error)
else:
    sys.exit("a wrong token was accepted")
PY
}
is_user() { # NAME
    podman exec "$1" grep -q '^Uid:.10001.10001.10001.10001' /proc/1/status
    podman exec "$1" sh -c 'tr "\0" " " </proc/1/cmdline; echo; ! touch /opt/recinfer/x 2>/dev/null; touch /tmp/x'
    podman exec "$1" grep -q '^CapEff:.0*$' /proc/1/status
}
stops() { # NAME EXPECTED SECONDS: SIGTERM to process 1, and SIGKILL after SECONDS. Not by kill: the restart policy applies to it
    local state
    podman stop --time "$3" "$1"
    state=$(podman inspect --format '{{.State.Status}} {{.State.ExitCode}}' "$1")
    podman logs "$1" 2>&1 | tail -3
    podman rm --force --time 0 "$1"
    echo "$state; expected exited $2 within $3 s"
    [ "$state" = "exited $2" ]
}

check "a server starts with a read-only root, no capability, no network" started one "$IMAGE"
check "its healthcheck passes" healthy one
check "it answers with the token, and refuses another" answers one 50051
check "it runs as user 10001 and writes only to /tmp" is_user one
check "SIGTERM ends it with 0" stops one 0 30
# Process 1 has no default handlers: without a handler of its own, the kernel drops SIGTERM.
for delay in 0 0.2 1 2; do
    started early "$IMAGE" >/dev/null
    sleep "$delay"
    check "SIGTERM $delay s after the start, as process 1, ends it at once" stops early 143 8
done

# -- several hosts -------------------------------------------------------------------------------------------------------

if [ "$KIND" = cuda ]; then
    echo "the compose file runs the CPU image"
elif command -v podman-compose >/dev/null; then
    compose() {
        RECINFER_STORE=$store RECINFER_MODEL=$(basename "$(dirname "$archive")") RECINFER_VERSION=$(basename "$archive") \
            RECINFER_TOKEN_FILE=$WORK/token podman-compose --file docker/compose.yaml --podman-run-args=--no-healthcheck "$@"
    }
    check "podman-compose starts two shards of two replicas and two rankers" compose up --detach --no-build shard-0 shard-1 ranker-0 ranker-1
    for ranker in $(podman ps --format '{{.Names}}' | grep ranker); do
        check "$ranker is healthy: it reaches both shards" healthy "$ranker"
        check "$ranker answers" answers "$ranker" 50051
    done
    gone=$(podman ps --format '{{.Names}}' | grep shard-0 | head -1)
    check "SIGTERM ends a replica of a shard with 0" stops "$gone" 0 30
    check "a ranker answers without it" answers "$ranker" 50051
    check "podman-compose down" compose down --timeout 20
else
    echo "skipped: podman-compose is not installed, so the compose file was not run"
fi

podman images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep recinfer
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
