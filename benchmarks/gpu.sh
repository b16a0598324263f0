#!/bin/sh
# All measurements on a GPU, in parts of at most five minutes; parts that are finished are left out. See docs/gpu.md.
cd "$(dirname "$0")/.." || exit
export OMP_WAIT_POLICY=passive COLUMNS="${COLUMNS:-168}"
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
