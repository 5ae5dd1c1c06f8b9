#!/usr/bin/env bash
# Checks and measures cowrec on this machine's GPU in less than 20 minutes, into results/HARDWARE/gpu_check.jsonl. Runs
# from a checkout with the Python of `make setup`, or else with python3; packages may also lie in folders on PYTHONPATH,
# and COWREC_COMMIT names the commit of a copy without .git. `--call`, `--parts` and `--help`: see gpu/check.py.
cd "$(dirname "$0")/.." || exit 1
python=.venv/bin/python
[ -x "$python" ] || python=python3
command -v "$python" >/dev/null || { echo 'gpu_check: there is no python3; install Python 3.11 or newer' >&2; exit 1; }
# A copy of the checkout may lack its links.
for package in trainer models sparse_opt data_pipeline; do
    [ -d "cowrec/$package" ] || ln -sfn "../$package" "cowrec/$package"
done
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m scripts.gpu.check "$@"
