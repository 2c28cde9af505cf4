"""Draw the figures of scripts.paper_figures; each module draws one kind of figure."""
