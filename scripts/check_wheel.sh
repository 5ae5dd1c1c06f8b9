#!/usr/bin/env bash
# Installs a wheel into a bare environment by the README's lines, for a CPU, and runs the demo's command and a tutorial.
#
#   bash scripts/check_wheel.sh build/dist/cowrec-0.1.0-py3-none-any.whl [PYTHON]
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
"${2:-python3}" -m venv "$outside/venv"
# The tutorial and the command must find the wheel, not the repository.
cd "$outside"
PATH="$outside/venv/bin:$PATH"
sed -n "s/ *#.*//; s/fbgemm-gpu=/fbgemm-gpu-cpu=/; s|'\.\[|'$wheel[|; s/^    pip install /pip install --quiet /p" \
    "$root/README.md" > install.sh
cat install.sh
bash -e install.sh
cowrec --version
cowrec demo --rows 20000 --output demo | tail -n 9
python "$root/docs/tutorials/own_data.py" "$outside"
