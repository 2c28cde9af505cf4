"""Programs that prepare data sets for fairseq.

In a checkout, run them as `python -m data_prep.<name>`. If the wheel is installed, run them as `python -m
lln_fairseq.data_prep.<name>`. For this reason the modules of this package import each other by relative names.

demo, wikitext103, glue and lra build data sets, tsv those of your own rows. encoders unpacks pre-trained models, and
fetch downloads single files. The code that they share is in lln_fairseq/text.
"""
