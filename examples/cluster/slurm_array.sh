#!/bin/bash
# Without Ray: an array of jobs, each of which prepares a split of the corpus, and a job that joins the splits:
#
#   ./slurm_array.sh 16 'corpus/*.jsonl' corpus.store model/ --filter gopher,c4
#
# Run it on the login node. To redo splits that failed, such as 3 and 7, and join again:
#
#   sbatch --array=3,7 slurm_split.sbatch 16 'corpus/*.jsonl' corpus.store model/ --filter gopher,c4
#   sbatch slurm_join.sbatch corpus.store

set -euo pipefail
splits=${1:?the number of splits}
store=${3:?the number of splits, the files to prepare, the store to write and the tokenizer}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

array=$(sbatch --parsable --array="1-$splits" "$here/slurm_split.sbatch" "$@")
array=${array%%;*} # a federation of clusters prints "job;cluster"
join=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes "$here/slurm_join.sbatch" "$store")
echo "array job $array, then join job ${join%%;*}"
