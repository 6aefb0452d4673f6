#!/usr/bin/env bash
# Starts one node's share of a run; run it on every node with the same arguments.
#
#   NNODES=2 HEAD=node0 bash scripts/launch/torchrun.sh sft @ configs/sft/qwen3_30b_a3b.toml
#
# The nodes need the same code, config and data at the same paths, and one output_dir they all see.
# parallel.dp_replicate x parallel.dp_shard must be NNODES x GPUS (dp_shard = -1 takes what is left).
#
#   NNODES   nodes in all (1)
#   GPUS     processes on this node (all its GPUs, or 1)
#   HEAD     host name of one node, the same everywhere (localhost)
#   PORT     a free port on it (29500)
#   JOB      a name that tells runs on the same HEAD apart (trainer)
#   SAVE_S   seconds that workers get to finish a step and save after SIGTERM (600)
set -euo pipefail

nnodes="${NNODES:-1}"
gpus="${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)}"
[ "${gpus:-0}" -gt 0 ] || gpus=1

# torchrun sends SIGTERM on and kills its workers 30 s later, which cuts a large save short (the
# checkpoint is then absent, never half). torch 2.13 lets the time be set. Where it cannot be (2.11),
# keep the time between checkpoints short, or send SIGTERM to the workers alone and let torchrun be:
#   pkill -TERM --parent PID_OF_TORCHRUN
options=()
if torchrun --help | grep -q -- --shutdown-timeout; then
    options+=(--shutdown-timeout "${SAVE_S:-600}")
fi

# torchrun sets one CPU thread a process unless told otherwise; sums depend on the number.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

exec torchrun \
    --nnodes "$nnodes" \
    --nproc-per-node "$gpus" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:-localhost}:${PORT:-29500}" \
    --rdzv-id "${JOB:-trainer}" \
    "${options[@]}" \
    -m trainer "$@"
