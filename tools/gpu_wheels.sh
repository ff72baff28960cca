#!/usr/bin/env bash
# Collect what tools/gpu_wheels.txt lists as wheels for a GPU machine that has no network. Copy the folder there with the clone;
# tools/gpu_proof.sh installs from it.
#   tools/gpu_wheels.sh                      into gpu-wheels/, for Python 3.12 on x86-64 Linux
#   tools/gpu_wheels.sh FOLDER
#   FOR_PYTHON=3.13 tools/gpu_wheels.sh      for another Python
#   PYTHON=/some/python tools/gpu_wheels.sh  with the pip of that interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
list=${WHEEL_LIST:-tools/gpu_wheels.txt}
folder=${1:-gpu-wheels}
limit=$((50 * 1000 * 1000)) # bytes
python=python3
if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
pip=("${PYTHON:-$python}" -m pip)

new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
sed -e '/# source only/d' -e 's/#.*//' -e '/^[[:space:]]*$/d' "$list" >"$new/binary"
sed -n 's/#[[:space:]]*source only.*//p' "$list" >"$new/source"
mkdir "$new/wheels"

platforms=(any)
for glibc in 28 27 24 17 12 5; do platforms+=("manylinux_2_${glibc}_x86_64"); done
platforms+=(manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64)
"${pip[@]}" download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "${FOR_PYTHON:-3.12}" \
  "${platforms[@]/#/--platform=}" --dest "$new/wheels" --requirement "$new/binary"
if [ -s "$new/source" ]; then
  # without their compiled operations, so that one wheel is good for every Python
  DS_BUILD_OPS=0 BUILD_CUDA_EXTENSIONS=0 "${pip[@]}" wheel --quiet --no-deps --wheel-dir "$new/built" --requirement "$new/source"
  for wheel in "$new"/built/*; do
    case $wheel in
      *-py3-none-any.whl) mv "$wheel" "$new/wheels/" ;;
      *) echo "error: ${wheel##*/} is a wheel for this machine only" >&2; exit 1 ;;
    esac
  done
fi

listed=$(cat "$new/binary" "$new/source" | wc -l)
wheels=$(find "$new/wheels" -name '*.whl' | wc -l)
size=$(find "$new/wheels" -name '*.whl' -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }')
if [ "$wheels" != "$listed" ]; then
  echo "error: $listed packages in $list, but $wheels wheels" >&2
  exit 1
fi
if [ "$size" -gt "$limit" ]; then
  echo "error: the wheels are $((size / 1000000)) MB, more than $((limit / 1000000)) MB; take packages off $list" >&2
  exit 1
fi
mkdir -p "$folder"
find "$folder" -maxdepth 1 -name '*.whl' -delete # those of another list: two versions of one package would not install
mv "$new"/wheels/*.whl "$folder/"
echo "$folder: $wheels wheels, $(((size + 999999) / 1000000)) MB"
