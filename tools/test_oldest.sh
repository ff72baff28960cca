#!/usr/bin/env bash
# Run the tests with the oldest version of every library that setup.cfg allows, in .venv-oldest, an environment of its own.
#   tools/test_oldest.sh                    the first size of the tests of data, models, engines, optimizers, checkpoints, training and interop
#   tools/test_oldest.sh tests/engine -x    these; words are passed on to pytest
# PYTHON names another interpreter than python3. Where no CPU build of the oldest PyTorch can be reached, the default one takes some GB.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1-}" in
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' tools/test_oldest.sh; exit ;;
esac

install() { .venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python "$@"; }
make_environment() {
    "${PYTHON:-python3}" -m venv --clear .venv-oldest
    .venv-oldest/bin/pip install -q uv
    oldest=(--resolution lowest-direct --editable ".[deepspeed,fairscale,plots,convert,text,parquet,completion]")
    install --torch-backend cpu "${oldest[@]}" 2>/dev/null || install "${oldest[@]}"
    # the tests' tools are of today
    mapfile -t tools < <(grep -oE '^ +(mpi4py|pytest|hypothesis|coverage|accelerate)[^ ]*' setup.cfg)
    install "${tools[@]}"
}
wanted=$({ cat setup.cfg; declare -f install make_environment; } | cksum | cut -d' ' -f1)
if [ "$(cat .venv-oldest/ready 2>/dev/null)" != "$wanted" ]; then
    make_environment
    printf '%s' "$wanted" >.venv-oldest/ready
fi

workers=$(env -u OMP_NUM_THREADS nproc)
export PATH="$PWD/.venv-oldest/bin:$PATH" OMP_NUM_THREADS=1
folders=(checkpoint data engine interop model optim parallel preprocess training)
case " $*" in *" tests"*) ;; *) set -- "$@" "${folders[@]/#/tests/}" ;; esac
# what they call of each other may be deprecated by now
pytest -n "$workers" --dist loadgroup --size first -m "not gpu and not slurm" -W ignore::DeprecationWarning "$@"
