"""One file for each kind of figure; `scripts.paper_figures` has the table of them."""
