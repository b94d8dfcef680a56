# shellcheck shell=bash
# Palmetto 2 (Clemson University). Copy to slurm/site.sh. Run `source slurm/site.sh` before sbatch, which reads the
# SBATCH_ variables. The jobs source it too. This is an example: compare partition (`sinfo`), GPUs and modules (`module
# spider anaconda`) with the site's pages. Jobs on nodes that belong to other groups may be preempted; they return to
# the queue by themselves.
export SBATCH_PARTITION=work1
export SBATCH_GPUS_PER_NODE=a100:2
site_environment() {
    module purge
    module load anaconda3
    source "$ACCEL_TRAIN_ROOT/.venv/bin/activate"
    # Or use a container, which needs no module:  container=(apptainer exec --nv "$HOME/accel_train.sif")
}
