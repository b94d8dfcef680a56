"""Trackers: a run's curves, settings and result in TensorBoard, Weights & Biases, MLflow, … by Accelerate's classes.

All curves come from the lines of metrics.jsonl, so that logging during the training and `accel-train track` send the
same. A run that is killed repeats the updates after its last checkpoint, and no value may appear twice:

* TensorBoard forgets values from a given step on when a new file says so (purge_step): it gets each line at once.
* The others cannot delete a step. So they get a step only when it is final: when a checkpoint of a later update, or
  of the finished epoch, is complete on the disk, or the run is finished.

RUN/trackers.json keeps each tracker's id of the run, and the last step that was sent.
"""
