"""What scripts/gpu_run.sh does on a GPU that is there for half an hour, in the order of schedule.py."""
