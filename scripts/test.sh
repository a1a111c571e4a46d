#!/usr/bin/env bash
# Run the tests in a .venv of their own making.
#
#   ./scripts/test.sh [WORDS FOR PYTEST]
#   ./scripts/test.sh --all [WORDS]    what CI runs: lint, format, types, and every test, heavy ones too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

all=false
words=()
for word in "$@"; do
    if [ "$word" = --all ]; then all=true; else words+=("$word"); fi
done

if $all; then
    prepare_venv dev
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
    # pyright fetches its own program on first use; where that cannot be had, the rest still runs.
    if .venv/bin/pyright --version >/dev/null 2>&1; then
        .venv/bin/pyright --pythonpath .venv/bin/python
    else
        echo "pyright cannot start here: types were not checked" >&2
    fi
    # There are no such wheels for every machine; tests/aot then skips, and says why.
    prepare_aot_venv || echo "cannot install what compiles for absent devices: tests/aot will be skipped" >&2
    if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
        echo "there is no chromium here (Debian's package of that name): tests/serve/test_page.py will be skipped" >&2
    fi
    words+=(--heavy)
else
    prepare_venv test
fi
# Two at a time, a file to each: on two cores that halves the time, and a worker takes about 4 GB.
exec .venv/bin/python -m pytest -n 2 --dist loadfile ${words[@]+"${words[@]}"}
