#!/bin/bash
# Two nodes of eight GPUs, weights sharded inside a node:  sbatch examples/slurm.sh RECIPE --set parallel.replicate=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@300
# SIGTERM 300 seconds before the time limit: the run saves a checkpoint. The same command goes on from it, also after a
# node was lost; if that node held the run's lock.json, the error says to delete it.
set -euo pipefail
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --wait 60 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu \
    --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m logitless train "$@" --resume-or-start
