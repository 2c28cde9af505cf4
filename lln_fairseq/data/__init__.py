"""The library behind data preparation and prediction. It turns published files and text into fairseq's data sets.

`download` and `archives` fetch published files and read them. `tokenizers` and `vocabulary` load or train a tokenizer
together with its dict.txt. `encode` turns lines into token ids on several cores, and `binary_format` writes fairseq's
.bin and .idx files. `manifest` builds an output directory and resumes an interrupted build. `text_ids` turns single
texts into token ids for prediction.

The fairseq tasks of this project use `checks`, which detects damaged data, and `sentence_inputs` and `split_lines`,
which define data sets that fairseq lacks.
"""
