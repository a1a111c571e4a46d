#!/usr/bin/env bash
# Run on a machine with an accelerator, in an environment with its JAX (pip install -r requirements/test.txt, then
# 'jax[cuda12]' or 'jax[tpu]'): kernels against the plain form, speculation against plain decoding, memory against
# what was predicted.
#
#   ./scripts/test_device.sh [WORDS FOR PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
JAXSPEC_TEST_DEVICE=1 exec "${PYTHON:-python}" -m pytest -p no:xdist -W default tests/device/test_device.py "$@"
