"""Programs that download public text and write it in fairseq's binary format.

Run them from a checkout as `python -m data_prep.<name>`. An installed wheel has them as `python -m
lln_fairseq.data_prep.<name>`, so the modules of this package import each other by relative names.

The programs demo, wikitext103, glue, newsgroups and lra each build a data set. The programs encoders, fetch and
train_tokenizer each do a single step. The code that they share is in lln_fairseq/data.
"""
