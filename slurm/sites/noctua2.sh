# shellcheck shell=bash
# Noctua 2 (PC2, Paderborn). Copy to slurm/site.sh and fill in the account. Run `source slurm/site.sh` before sbatch,
# which reads the SBATCH_ variables. The jobs source it too. This is an example: compare partition (`sinfo`), GPUs and
# modules (`module spider python`) with the site's pages.
export SBATCH_ACCOUNT=hpc-prf-PROJECT
export SBATCH_PARTITION=gpu
export SBATCH_GRES=gpu:a100:4
site_environment() {
    module reset
    module load lang/Python
    source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"
}
