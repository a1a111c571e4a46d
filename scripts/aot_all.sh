#!/usr/bin/env bash
# Compiles every config with a report in docs/aot.md for its topology; WORDS go to each `jaxspec aot`.
#
#   ./scripts/aot_all.sh [WORDS]    such as --layers 2 4, or none; the last line of each is one JSON object
set -uo pipefail
cd "$(dirname "$0")/.."
python=${JAXSPEC_AOT_PYTHON:-.venv-aot/bin/python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
status=0
while read -r config topology; do
    started=$SECONDS
    echo "== $config on $topology"
    "$python" -m jaxspec.cli aot --config "configs/$config.yaml" --topology "$topology" --json "$@" </dev/null || status=1
    echo "== $((SECONDS - started)) s"
done <<END
llama3.1-8b-eagle3 h100:1
llama3.1-70b-draft h100:8
v6e-8-draft-model v6e:2x4
qwen3-32b-eagle3 v6e:2x4
qwen3-30b-a3b h200:1
deepseek-v3-mtp h200:2x8
END
exit $status
