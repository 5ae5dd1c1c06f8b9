#!/usr/bin/env bash
# Runs every test and benchmark that needs a GPU, in less than 8 minutes, into results/HARDWARE/gpu_check.json.
cd "$(dirname "$0")/.." || exit 1
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" scripts/gpu_check.py "$@"
