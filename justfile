# Chores of pushd. `just` lists them; each creates what it needs.

set shell := ["bash", "-euo", "pipefail", "-c"]

bin := justfile_directory() / ".venv/bin"

_default:
    @just --list --unsorted

# Make .venv from the hash-pinned lock (done by every recipe that needs it; quick when nothing changed)
setup:
    #!/usr/bin/env bash
    set -euo pipefail
    stamp="$(cat requirements-dev.lock pyproject.toml | sha256sum | cut -d' ' -f1)"
    if [ -x .venv/bin/python ] && [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then exit 0; fi
    for candidate in "${PUSHD_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python="$candidate"; break
        fi
    done
    if [ -z "${python:-}" ]; then echo "pushd needs Python 3.11 or newer; name one with PUSHD_PYTHON" >&2; exit 1; fi
    echo "Installing into .venv ..." >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-dev.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    echo "$stamp" > .venv/stamp

# Show pushes arriving: a whole installation with fake providers on this machine
demo *ARGS: setup
    {{bin}}/pushd demo {{ARGS}}

# Serve with the embedded PostgreSQL in ./pushd-data
serve *ARGS: setup
    {{bin}}/pushd serve {{ARGS}}

# Run the tests in random order (the seed is printed)
test *ARGS: setup
    {{bin}}/python -m pytest {{ARGS}}

# Everything a change must pass
check: setup lint plain (faults "--short") (fuzz "--short") test

# Kill, cut, freeze and fill everything under load, then balance the account of every push (--short: each fault once)
faults *ARGS: setup
    {{bin}}/python -m pytest -o python_files='fault_*.py' -p no:randomly -q tests/faults {{ARGS}}

# Throw hostile input at everything that reads what others wrote, for an hour (--short: a minute; --minutes N; a target)
fuzz *ARGS: setup
    #!/usr/bin/env bash
    set -euo pipefail
    # Atheris takes part where it installs, except in the short run.
    if [[ " {{ARGS}} " != *" --short "* ]] && ! {{bin}}/python -c 'import atheris' 2>/dev/null; then
        {{bin}}/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
            --require-hashes -r tests/fuzz/atheris.txt || echo "going on without Atheris" >&2
    fi
    exec {{bin}}/python -m tests.fuzz {{ARGS}}

# Serve equal loads with rests between them for so many minutes, and see that every rest finds the same
soak MINUTES="10": setup
    {{bin}}/python -m tests.faults.soak {{MINUTES}}

# Style, types, import directions, generated files
lint: setup
    {{bin}}/ruff check .
    {{bin}}/ruff format --check .
    {{bin}}/mypy pushd fakes
    {{bin}}/lint-imports --no-cache
    {{bin}}/python -m pushd.rpc.generate --check

# Install without the lock (h2 3.2, as purerpc's metadata asks) and run the suites that touch HTTP/2 there
plain:
    #!/usr/bin/env bash
    set -euo pipefail
    just setup
    stamp="$(cat pyproject.toml | sha256sum | cut -d' ' -f1)"
    if [ ! -x .venv-plain/bin/python ] || [ "$(cat .venv-plain/stamp 2>/dev/null)" != "$stamp" ]; then
        rm -rf .venv-plain
        .venv/bin/python -m venv .venv-plain
        .venv-plain/bin/python -m pip install --quiet --disable-pip-version-check . \
            pytest pytest-trio==0.8.0 pytest-randomly hypothesis trustme grpcio grpcio-health-checking grpcio-reflection
        echo "$stamp" > .venv-plain/stamp
    else
        .venv-plain/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
    fi
    .venv-plain/bin/pushd --version
    .venv-plain/bin/python -c "import h2; assert h2.__version__.startswith('3.2'), h2.__version__"
    (cd / && "{{justfile_directory()}}/.venv-plain/bin/pushd" demo --json --seconds 1)
    .venv-plain/bin/python -m pytest -q tests/rpc tests/channels/test_{http2,apns,fcm}*.py \
        --ignore=tests/rpc/test_generated.py # about protoc, which is a tool of the lock

# Run one benchmark (or all of them); each prints one JSON line last
bench NAME="": setup
    #!/usr/bin/env bash
    set -euo pipefail
    name="{{NAME}}"
    if [ -n "$name" ]; then files=("tests/bench/bench_${name//-/_}.py"); else files=(tests/bench/bench_*.py); fi
    for file in "${files[@]}"; do
        module="${file%.py}"; {{bin}}/python -m "${module//\//.}"
    done

# Rewrite pushd/rpc/gen from protos/
protos: setup
    {{bin}}/python -m pushd.rpc.generate

# Resolve the dependencies anew into the lock files
lock:
    #!/usr/bin/env bash
    set -euo pipefail
    work="$(mktemp -d)"; trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet uv
    # purerpc 0.8.0 caps h2 below 4; its services run on 4.4 behind our own connection layer.
    echo 'h2>=4.4,<5' > "$work/override.txt"
    compile=("$work/venv/bin/uv" pip compile --quiet --universal --generate-hashes --python-version 3.11
        --override "$work/override.txt" --no-emit-index-url --no-emit-find-links --no-header --no-annotate)
    "${compile[@]}" pyproject.toml --output-file requirements.lock
    "${compile[@]}" --group dev pyproject.toml --output-file requirements-dev.lock
