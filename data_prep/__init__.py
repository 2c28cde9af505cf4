"""Programs that turn public text into fairseq's binary format; run them as `python -m data_prep.<name>` in a checkout.

A wheel has them as `python -m lln_fairseq.data_prep.<name>`, so imports inside the package are relative.

Data sets: demo, wikitext103, glue, newsgroups, lra. One step alone: encoders (pre-trained ones), fetch,
train_tokenizer. What they share is the library lln_fairseq/data.
"""
