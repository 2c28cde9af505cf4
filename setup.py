"""Packaging of lln-fairseq (import name: lln_fairseq)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "lln_fairseq" / "__init__.py").read_text(), re.MULTILINE)[1]
FOLDERS = {"lln_fairseq.configs": "configs", "lln_fairseq.data_prep": "data_prep"}  # where they are in a checkout
# scripts/test_transformers.sh runs the tests with both ends of transformers' range.
HUGGING_FACE = ["safetensors>=0.5,<0.9", "tokenizers>=0.22,<0.24", "transformers>=4.57,<6"]
ONNX = ["onnx>=1.23,<1.24", "onnxruntime>=1.31,<1.32", "onnxscript>=0.7,<0.8"]

setup(
    name="lln-fairseq",
    version=VERSION,
    description="Linear Log-Normal attention with block-diagonal softmax (LLN+Diag) for fairseq's RoBERTa",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=[*find_packages(include=["lln_fairseq", "lln_fairseq.*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={
        "lln_fairseq": ["py.typed", "ops/*.json", "ops/backends/cpu/csrc/*"],
        "lln_fairseq.configs": ["**/*.yaml"],
    },
    entry_points={"console_scripts": ["lln-fairseq = lln_fairseq.__main__:main"]},
    # ve-fairseq, the fairseq that runs on current Pythons, has wheels for 3.11 and 3.12 only. What needs no fairseq,
    # such as lln_fairseq.hub, also runs with 3.13, installed with --no-deps.
    python_requires=">=3.11,<3.14",
    # From the lowest that has run to below the next that may break something. The whole suite runs with
    # requirements.txt; CONTRIBUTING.md lists what ran with others. Each torch brings a triton of its own, 3.6 to 3.8.
    install_requires=[
        "torch>=2.11,<2.15",
        'triton>=3.6,<3.9; platform_system == "Linux"',
        "ve-fairseq==0.12.3",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "numpy>=2.0,<2.6",
        "scipy>=1.13,<1.18",
        "sentencepiece>=0.2,<0.3",
        "tiktoken>=0.8,<1",
        "tensorboard>=2.18,<3",
        "matplotlib>=3.9,<4",
        "threadpoolctl>=3.1,<4",
        "tqdm>=4.66,<5",
        "requests>=2.31,<3",
        "pillow>=10.4,<14",
    ],
    extras_require={
        "test": [
            "hypothesis>=6.170,<7",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "pytest-xdist>=3.6,<4",
            "scikit-learn>=1.5,<1.10",
            "sentence-transformers>=5.4,<7",  # version 6 needs transformers 5
            "ruff==0.17.5",
            "mypy==2.4.1",
            *HUGGING_FACE,
            *ONNX,
        ],
        "hf": HUGGING_FACE,
        "onnx": [*HUGGING_FACE, *ONNX],
    },
)
