#!/bin/sh
# Make a virtual environment that holds what an image needs and no more; the Dockerfile and deploy/sizes.py run this.
#
#   deploy/install.sh PREFIX EXTRAS WHEEL
#
# PREFIX  folder of the environment; it must keep its path where it runs
# EXTRAS  cpu, cuda12 or cuda13, and any of http, router, structured, otel, separated by commas
# WHEEL   engine-llm's wheel
#
# CUBINS  architectures to compile CUDA kernels for (sm_80,sm_90); NVRTC and the headers it reads then leave the environment
# PYTHON  interpreter to use, python3 if unset
set -eu
prefix=$1 extras=$2 wheel=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/pip"
"${PYTHON:-python3}" -m venv --without-pip "$prefix"
pip() { "$work/pip/bin/python" -m pip --quiet --python "$prefix/bin/python" "$@"; }
pip install --no-cache-dir "$wheel[$extras]"

if [ -n "${CUBINS:-}" ]; then
    site=$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$prefix/bin/engine" compile --arch "$CUBINS" --output "$site/engine/devices/cuda/cubins"
    # shellcheck disable=SC2046  # one word a package
    pip uninstall --yes $("$work/pip/bin/python" -m pip --python "$prefix/bin/python" list --format freeze |
        sed -n 's/^\(nvidia-cuda-nvrtc[^=]*\)==.*/\1/p')
fi
case ",$extras," in
# Compiled for this processor; another kind compiles its own at the first start, for about a minute.
*,cpu,*) "$prefix/bin/python" -m engine.devices.cpu.warmup ;;
esac
