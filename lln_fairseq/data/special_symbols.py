"""fairseq's special symbols. Its dictionaries begin with them, and dict.txt does not list them."""

SPECIAL_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # symbol i has the id i
NUM_SPECIAL = 4  # symbol i of dict.txt has the id 4 + i
BOS = 0
PAD = 1
EOS = 2
UNKNOWN = 3
MASK = "<mask>"  # the tasks append it to the dictionary
