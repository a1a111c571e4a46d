#!/usr/bin/env bash
# Two nodes of eight GPUs under SLURM: a process a GPU, 16 as one server. sbatch configs/deploy/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --requeue
srun --kill-on-bad-exit=1 python -m jaxspec.serve \
  --config=configs/llama3.1-70b-draft.yaml \
  --host=0.0.0.0 \
  --tensor-parallel-size=16 \
  --nnodes=auto
