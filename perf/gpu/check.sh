#!/usr/bin/env bash
# Check the CUDA device on this machine's GPU and time it; see perf/gpu/check.py.
# Needs the package installed with its extra cuda13 or cuda12 (PYTHON names its Python); no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
export ENGINE_CACHE_DIR="${ENGINE_CACHE_DIR:-$(mktemp -d)}"
exec timeout 600 "${PYTHON:-python3}" -m perf.gpu.check --commit "$(git describe --always --dirty)" "$@"
