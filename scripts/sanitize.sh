#!/usr/bin/env bash
# Builds moet._core with the address and undefined-behaviour sanitizers into a throwaway folder and
# runs the tests that exercise it. Any finding ends the process that made it, so the tests fail.
#
#   scripts/sanitize.sh [pytest arguments]      default: all tests that call _core but the slow ones
#
# PYTHON names the interpreter (default: python3); it needs moet's dependencies, nanobind, cmake,
# ninja and pytest. SANITIZE chooses others: SANITIZE=thread is possible too.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
sanitize=${SANITIZE:-address,undefined}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

bin=$(dirname "$("$python" -c 'import sys; print(sys.executable)')")
export PATH="$bin:$PATH"

cmake -S "$root" -B "$folder/build" -G Ninja \
  -DCMAKE_BUILD_TYPE=Release \
  -DMOET_SANITIZE="$sanitize" \
  -DMOET_VERSION="$("$python" -c 'import tomllib, sys; print(tomllib.load(open(sys.argv[1], "rb"))["project"]["version"])' "$root/pyproject.toml")" \
  -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
  -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" > "$folder/configure.log" \
  || { cat "$folder/configure.log" >&2; exit 1; }
cmake --build "$folder/build"

# A package folder of its own, so that neither an editable install nor its rebuild hook gets in.
mkdir "$folder/package"
cp -r "$root/src/moet" "$folder/package/"
cp "$folder"/build/_core*.so "$folder/package/moet/"

runtimes=()
case ",$sanitize," in
  *,address,*) runtimes+=("$("${CXX:-g++}" -print-file-name=libasan.so)") ;;
  *,thread,*) runtimes+=("$("${CXX:-g++}" -print-file-name=libtsan.so)") ;;
esac
# libstdc++ as well: the sanitizer must find __cxa_throw before Python loads it.
runtimes+=("$("${CXX:-g++}" -print-file-name=libstdc++.so)")

# The pool, instruction sets, single kernels, whole layers, repacking, loading, the cores' plan, reads.
# Not test_cuda_build: it calls NVRTC alone, whose libraries do not find each other under asan.
if [ $# -eq 0 ]; then
  set -- tests/kernels tests/formats/test_repack.py tests/hybrid tests/machine \
    tests/tiers/test_reads.py tests/tiers/test_nvme.py tests/engine/test_cores.py --ignore=tests/kernels/test_cuda_build.py -m "not slow"
fi

# Leaks: the interpreter keeps memory to its end on purpose, so that check is off.
cd "$root"
env LD_PRELOAD="$(IFS=:; echo "${runtimes[*]}")" \
  ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
  UBSAN_OPTIONS=print_stacktrace=1 \
  TSAN_OPTIONS=halt_on_error=1 \
  PYTHONPATH="$folder/package" \
  "$python" -c '
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()]
from moet import _core
assert _core.sanitized, f"{_core.__file__} is not the sanitized build"
import pytest
sys.exit(pytest.main(sys.argv[1:]))
' -p no:cacheprovider "$@"
