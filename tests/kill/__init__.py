"""kill -9 at random moments: whatever is killed, the same command finishes with the result of an undisturbed run.

python -m tests.kill --kills 100

A subject is killed one to three times in a row, then left alone. Each run is a fork of one process that has imported
everything, so that the moments fall into the work and not into Python's start.
"""
