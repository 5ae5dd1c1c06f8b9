#!/usr/bin/env bash
# Measures cowrec on this machine's GPU in less than 8 minutes, into results/HARDWARE/gpu_check.json. Runs from a
# checkout with the Python of `make setup`, or else with python3; gpu/check.py names the packages that it needs.
cd "$(dirname "$0")/.." || exit 1
python=.venv/bin/python
[ -x "$python" ] || python=python3
command -v "$python" >/dev/null || { echo 'gpu_check: there is no python3; install Python 3.11 or 3.12' >&2; exit 1; }
# The import name cowrec as a folder of links, as an installation would provide it.
mkdir -p build/checkout/cowrec
for package in trainer models sparse_opt data_pipeline; do
    ln -sfn "../../../$package" "build/checkout/cowrec/$package"
done
PYTHONPATH="$PWD/build/checkout${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m scripts.gpu.check "$@"
