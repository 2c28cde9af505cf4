"""Turn text into fairseq's data sets and token ids.

`tokenizers` and `vocabulary` load or train a tokenizer with its dict.txt. `parallel_encoder` turns lines into token ids
on several cores, `samples` texts into samples for prediction, and `binary_format` writes fairseq's .bin and .idx files.
`pairs` finds the two texts of a pair in token ids. `rows` reads the texts and labels of a user's files.

The fairseq tasks of this project use `checks`, which detects damaged data, and `sentence_datasets` and `long_lines`,
which define data sets that fairseq lacks.
"""
