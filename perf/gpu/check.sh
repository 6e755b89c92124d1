#!/usr/bin/env bash
# Check the CUDA device on this machine's GPU and time it for the first time; see perf/gpu/check.py.
# Needs Python 3.11 or newer (PYTHON names it), CuPy 14 for CUDA 12 or 13, NVRTC, NumPy, ml_dtypes and tokenizers; no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
export ENGINE_CACHE_DIR="${ENGINE_CACHE_DIR:-$(mktemp -d)}"
exec timeout 600 "${PYTHON:-python3}" -m perf.gpu.check "$@"
