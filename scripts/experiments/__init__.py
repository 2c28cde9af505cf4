"""Run experiments: series of training runs with tables of their results. scripts/*.sh start some of them."""
