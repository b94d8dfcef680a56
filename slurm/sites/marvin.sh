# shellcheck shell=bash
# Marvin (University of Bonn). Copy to slurm/site.sh and fill in the account. Run `source slurm/site.sh` before sbatch,
# which reads the SBATCH_ variables. The jobs source it too. This is an example: compare partition (`sinfo`), GPUs and
# modules (`module spider python`) with the site's pages.
export SBATCH_ACCOUNT=ag_GROUP
export SBATCH_PARTITION=sgpu_medium
export SBATCH_GPUS_PER_NODE=4
site_environment() {
    module purge
    module load Python
    source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"
}
