#!/bin/bash
#SBATCH --job-name=rla
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#
# Train on several nodes, one process per GPU, from the repository root:
#
#   sbatch [--nodes=N ...] scripts/slurm.sh EXPERIMENT CONFIG [options of rla fit]
#   sbatch --nodes=4 scripts/slurm.sh judge14b configs/scale/alfworld_qwen2.5-7b_full.yaml --seed_everything 1
#
# Runs go to runs/EXPERIMENT, on a file system that all nodes share. An experiment that has a checkpoint goes on from
# the last one: when the time is over, after a preemption, and when the same line is submitted again.
set -euo pipefail

if [ "$#" -lt 2 ]; then
    echo "usage: sbatch [options of sbatch] scripts/slurm.sh EXPERIMENT CONFIG [options of rla fit]" >&2
    exit 2
fi
experiment=$1 config=$2
shift 2

# All tasks of a node have to see all its GPUs (no --gpus-per-task): each process takes the one of its local rank.
# They share the node's CPUs, too, instead of being bound to some: programs' sandboxes divide them.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR
export MASTER_PORT=$((15000 + SLURM_JOB_ID % 10000))

options=(--config "$config" --config configs/trainer/fsdp2_multinode.yaml --experiment "$experiment")
options+=(--trainer.num_nodes "$SLURM_JOB_NUM_NODES" --trainer.devices "$SLURM_NTASKS_PER_NODE" "$@")
if compgen -G "runs/$experiment/version_*/checkpoints/last.ckpt" > /dev/null; then
    options+=(--ckpt_path last)
fi

# The signal comes to this script alone, two minutes before the end. If the processes got it, too, each would start to
# save a checkpoint (Lightning's own requeueing) at another point of an epoch, and they would wait for each other.
requeue() {
    echo "out of time: the job starts again from its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
}
trap requeue USR1

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none --kill-on-bad-exit=1 .venv/bin/rla fit "${options[@]}" &
processes=$!
wait "$processes" || wait "$processes" # the signal ends the first
