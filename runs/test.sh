#!/usr/bin/env bash
# Sets everything up and runs the tests; arguments go to pytest (bash runs/test.sh -k shell).
set -euo pipefail
unset CDPATH # with it cd prints, or finds another folder
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash runs/setup.sh
exec .venv/bin/python -m pytest -q "$@"
