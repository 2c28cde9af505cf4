"""Run the experiments that scripts/*.sh start: series of training runs, with tables of their results."""
