#!/usr/bin/env bash
# The kernels' tests with the native module built under sanitizers (default: address and undefined behaviour).
# usage: csrc/sanitize.sh [pytest arguments]      SANITIZE=thread for the pool's tests
set -euo pipefail
cd "$(dirname "$0")/.."
sanitize=${SANITIZE:-address,undefined}
build=build/sanitize-${sanitize//,/-}
python=$(command -v python)
generator=$(command -v ninja >/dev/null && echo Ninja || echo "Unix Makefiles")

cmake -S . -B "$build" -G "$generator" -DPython_EXECUTABLE="$python" -DOCTAVO_SANITIZE="$sanitize" >/dev/null
cmake --build "$build" --target _native --parallel "$(nproc)"

library=$([[ $sanitize == *thread* ]] && echo libtsan.so || echo libasan.so)
export LD_PRELOAD="$(${CXX:-c++} -print-file-name=$library) $(${CXX:-c++} -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH=src:. OPENBLAS_NUM_THREADS=1

# The module under test takes the place of the installed one before anything imports it.
exec "$python" - "$build" "${@:-tests/kernels}" <<'PYTHON'
import glob
import importlib.util
import sys

import pytest

build, *arguments = sys.argv[1:]
[path] = glob.glob(f"{build}/_native*.so")
spec = importlib.util.spec_from_file_location("octavo._native", path)
module = importlib.util.module_from_spec(spec)
sys.modules["octavo._native"] = module
spec.loader.exec_module(module)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
PYTHON
