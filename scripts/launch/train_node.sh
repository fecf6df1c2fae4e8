#!/usr/bin/env bash
# Start the processes of a training on this node by torchrun; the arguments are those of train_text_to_video.py.
# Under Slurm, which train.sbatch uses, NNODES and NODE_RANK are not needed.
set -euo pipefail
exec "${PYTHON:-python}" -m torch.distributed.run \
	--nnodes "${SLURM_NNODES:-${NNODES:?set it to the number of nodes}}" \
	--node-rank "${SLURM_NODEID:-${NODE_RANK:?set it to the number of this node, from 0}}" \
	--nproc-per-node "${PROCESSES_PER_NODE:-8}" \
	--master-addr "${MASTER_ADDR:?set it to the address of node 0}" --master-port "${MASTER_PORT:-29500}" \
	"$(dirname "$0")/../train_text_to_video.py" "$@"
