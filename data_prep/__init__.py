"""Programs that turn public text into fairseq's binary format; run them as `python -m data_prep.<name>` from here.

A program is its sources, its reading of them and its expected counts. What programs share, one concern a file:
command (errors and exit codes), fetch (archives, checksums, atomic files), text (cleaning, splits), tokenizers,
binarize (fairseq's format), manifest (the output directory). Nothing here imports lln_fairseq.
"""
