#!/usr/bin/env bash
# See SmolLM2 answer through the speculative server: sets up .venv, starts the server, asks one question.
#
#   ./scripts/demo.sh           leaves the server running until Ctrl-C
#   ./scripts/demo.sh --once    stops it after the answer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh
prepare_venv run
exec .venv/bin/python scripts/demo.py "$@"
