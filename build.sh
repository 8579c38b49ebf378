#!/usr/bin/env bash
# The one way to set up, try, check and measure Headrace. Run `./build.sh` for the verbs; docs/develop.md says more.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
# HEADRACE_VENV names an environment that somebody else keeps (a git worktree sharing its main checkout's): it is used
# as it is, and PYTHONPATH makes this checkout's code win over the one installed there.
if [[ -n ${HEADRACE_VENV:-} ]]; then
    export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
fi
VENV=${HEADRACE_VENV:-$ROOT/.venv}
STAMP=$VENV/.headrace-setup
SERVERS=(etcd:etcd-server redis-server:redis-server) # binary:Debian package

usage() {
    cat <<'USAGE'
usage: ./build.sh VERB

  setup           make .venv and install everything into it; does nothing when that is done
  demo            set up, then watch models answer through separate processes
  test [ARGS]     set up, lint, then all tests; ARGS go to pytest
  lint            ruff, mypy, import-linter, buf, and whether generated code is current
  proto           generate headrace/v1 from proto/
  torture [ARGS]  kill, cut the power, damage and fill up stores, in full; `test` runs a short form of it
  fuzz [ARGS]     mutated messages and forged handles against every port, in full; `test` runs a short form of it
  soak [ARGS]     kill, freeze and cut off processes under load with known answers (--minutes 10 --seed 1 --json)
  bench NAME …    run one benchmark; further arguments go to it (try --json)

environment
  PYTHON                     the interpreter to make .venv with (3.11, or a later one that has torch)
  HEADRACE_VENV              use this environment as it is instead of .venv
  HEADRACE_WITHOUT_SERVERS   1: go on without etcd and Redis; their tests are skipped and say so
USAGE
}

say() {
    if [[ -t 2 ]]; then printf '\033[1m==> %s\033[0m\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}

die() {
    printf 'build.sh: %s\n' "$*" >&2
    exit 1
}

# Install Debian packages, or say which are needed.
apt_install() {
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        return 1
    fi
    say "Installing $* with apt-get"
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >&2
}

# Print the first interpreter that can be used: 3.11, else a later one.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# etcd and Redis servers are started by the tests themselves; distribution services are neither used nor touched.
ensure_servers() {
    local pair missing=()
    for pair in "${SERVERS[@]}"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
    done
    if ((${#missing[@]} == 0)) || [[ ${HEADRACE_WITHOUT_SERVERS:-} == 1 ]]; then
        return
    fi
    apt_install "${missing[@]}" ||
        die "tests need ${missing[*]}: install them as root with apt-get, or set HEADRACE_WITHOUT_SERVERS=1"
}

# Hash of what decides the contents of the environment.
wanted_stamp() {
    local python=$1
    { cat pyproject.toml constraints.txt build.sh; "$python" -VV; echo "$ROOT"; } | sha256sum | cut -d' ' -f1
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "${PIP_VERBOSITY[@]}" "$@"; }

setup() {
    if [[ -n ${HEADRACE_VENV:-} ]]; then
        [[ -x $VENV/bin/python ]] || die "HEADRACE_VENV=$VENV has no bin/python"
        return
    fi
    local python
    if ! python=$(find_python); then
        apt_install python3 python3-venv || die "no Python ≥ 3.11 found: install one, or name it with PYTHON=…"
        python=$(find_python) || die "this distribution's Python is older than 3.11: name a newer one with PYTHON=…"
    fi
    local stamp
    stamp=$(wanted_stamp "$python")
    if [[ -f $STAMP && $(<"$STAMP") == "$stamp" ]]; then
        return
    fi
    # Two builds of one checkout at a time would spoil each other's environment.
    local lock
    exec {lock}<"$ROOT/build.sh"
    flock "$lock"
    if ! [[ -f $STAMP && $(<"$STAMP") == "$stamp" ]]; then
        install "$python"
        echo "$stamp" >"$STAMP"
        say "Ready: $VENV"
    fi
    exec {lock}<&-
}

# Make the environment anew over whatever is there.
install() {
    local python=$1 minor torch module site=() constraints=constraints.txt
    rm -f "$STAMP"

    minor=$("$python" -c 'import sys; print(sys.version_info.minor)')
    if ((minor > 11)); then
        # The pinned CPU build of torch is for 3.11; a plain install elsewhere may drag gigabytes of CUDA.
        torch=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])' 2>/dev/null) ||
            die "$python is 3.$minor and has no torch: install torch for it first, or use Python 3.11 (PYTHON=…)"
        site=(--system-site-packages)
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        apt_install python3-venv || die "$python has no venv module: install python3-venv"
    fi

    if [[ -t 2 ]]; then PIP_VERBOSITY=(--progress-bar on); else PIP_VERBOSITY=(--quiet); fi
    say "Making $VENV with $("$python" -V)"
    "$python" -m venv --upgrade-deps "${site[@]}" "$VENV"
    if ((minor > 11)); then
        constraints=$VENV/constraints.txt
        echo "torch==$torch" >"$constraints"
    else
        say "Installing torch (about 200 MB)"
        pip_install -c "$constraints" torch
    fi
    say "Installing Headrace and what it needs"
    pip_install -c "$constraints" -e '.[demo,dev]'
    # Its metadata asks for a CUDA torch, which it does not need.
    pip_install --no-deps nixl-cu12==1.5.1
    # Likewise for a CUDA triton, and for transformers, of which it uses nothing here.
    pip_install --no-deps xgrammar==0.2.9
    "$VENV/bin/python" -c 'import torch, nixl_cu12, xgrammar, headrace' || die "the environment in $VENV does not import"
    # Compiled where they run, now instead of at the first start. Without them torch and Python do it, several times slower.
    say "Compiling the C++ libraries"
    command -v g++ >/dev/null || apt_install g++ || true
    for module in kernels.native.build router.native.build kvcache.store.segments.native.library; do
        "$VENV/bin/python" -m "headrace.$module" || say "headrace.$module: what it does will be several times slower"
    done
}

# Run all checks, then fail if any did.
lint() {
    local failed=()
    check() {
        say "$1"
        "${@:2}" || failed+=("$1")
    }
    check ruff "$VENV/bin/ruff" check .
    check "ruff format" "$VENV/bin/ruff" format --check .
    check mypy "$VENV/bin/mypy" -p headrace
    check import-linter "$VENV/bin/lint-imports" --no-logo
    check buf "$VENV/bin/buf" lint
    check "buf format" "$VENV/bin/buf" format --diff --exit-code
    check "generated code" "$VENV/bin/python" proto/generate.py --check
    ((${#failed[@]} == 0)) || die "lint failed: $(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
}

verb=${1:-}
shift || true
# One thread per process: the tests start many, and two cores are enough for none of them to wait for a spinning one.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} UCX_NET_DEVICES=${UCX_NET_DEVICES:-lo} HF_HUB_OFFLINE=1
case $verb in
setup)
    setup
    ensure_servers
    ;;
demo)
    setup
    exec "$VENV/bin/python" examples/demo.py "$@"
    ;;
test)
    setup
    ensure_servers
    lint
    say "pytest"
    # By file, so that a module's servers are started once. Programs that tests start find bench/ wherever they run.
    workers=$(env -u OMP_NUM_THREADS nproc) # which would else answer 1
    export PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    exec "$VENV/bin/python" -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile --durations 25 "$@"
    ;;
lint)
    setup
    lint
    ;;
proto)
    setup
    exec "$VENV/bin/python" proto/generate.py
    ;;
torture)
    setup
    export HEADRACE_TORTURE=full PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    exec "$VENV/bin/python" -m pytest -n 0 -q --show-capture=no tests/torture "$@"
    ;;
fuzz)
    setup
    export PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    exec "$VENV/bin/python" -m tests.fuzz "$@"
    ;;
soak)
    setup
    ensure_servers
    export PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
    exec "$VENV/bin/python" -m tests.chaos "$@"
    ;;
bench)
    [[ $# -ge 1 ]] || die "bench needs a name: $(cd bench && ls | sed -n 's/^\([a-z].*\)\.py$/\1/p' | tr '\n' ' ')"
    setup
    name=$1
    shift
    unset OMP_NUM_THREADS
    exec "$VENV/bin/python" -m "bench.$name" "$@"
    ;;
'' | -h | --help | help)
    usage
    ;;
*)
    usage >&2
    die "no verb $verb"
    ;;
esac
