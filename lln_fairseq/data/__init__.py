"""From published files and lines of text to data that fairseq trains on.

download, archives: get published files and read them. tokenizers, vocabulary: a tokenizer with its dict.txt. encode:
lines to ids, on several cores. binary_format: fairseq's .bin and .idx files. manifest: builds a data directory and
resumes it. text_ids: the ids of single texts, for prediction.

checks, sentence_inputs and split_lines are for the tasks: damaged data, and data sets that fairseq does not have.
"""
