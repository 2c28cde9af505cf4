"""Programs that prepare public data sets for fairseq.

Run them from a checkout as `python -m data_prep.<name>`. An installed wheel has them as `python -m
lln_fairseq.data_prep.<name>`, so the modules of this package import each other by relative names.

demo, wikitext103, glue, newsgroups and lra build data sets. encoders unpacks pre-trained models, fetch downloads single
files, and train_tokenizer trains a tokenizer. The code that they share is in lln_fairseq/data.
"""
