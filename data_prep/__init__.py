"""Programs that turn public text into fairseq's binary format; run them as `python -m data_prep.<name>` in a checkout.

A wheel has them as `python -m lln_fairseq.data_prep.<name>`.

Programs: demo, wikitext103, glue; encoders (pre-trained ones); and fetch, tokenizers for one step alone. What they
share, one concern a file: command (errors and exit codes), files (atomic writes), archives (reading), sources (every
published file), download (the cache), text (lines, cleaning, splits), tokenizers,
vocabulary (a tokenizer with its dict.txt), encode (parallel), binarize (fairseq's format), manifest (the output
directory). Of lln_fairseq only command.py is used, and imports inside are relative: the package works under another
name too.
"""
