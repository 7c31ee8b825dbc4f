#!/usr/bin/env bash
# Three steps of a 1.1 B-parameter Llama from SSD, in a process that may use 4 GiB of memory.
#
#   scripts/train_1b.sh [RUN]
#
# RUN is the folder to create (default runs/llama-1b); it takes 29 GiB of disk. To see that 4 GiB is enough,
# start it inside a hard limit, for example
#
#   systemd-run --scope -p MemoryMax=4G -p MemorySwapMax=0 scripts/train_1b.sh
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${GREEDYSNAKE_BIN:-.venv/bin}
text=$("$bin/python" -c 'import asyncio, os; print(os.path.dirname(asyncio.__file__))')
exec "$bin/greedysnake" train examples/llama-1b.yaml \
    "run=${1:-runs/llama-1b}" "data.train=$text" training.steps=3 optimizer.warmup_steps=1 optimizer.lr=1e-5
