"""Packaging of lln-fairseq (import name: lln_fairseq)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "lln_fairseq" / "__init__.py").read_text(), re.MULTILINE)[1]
FOLDERS = {"lln_fairseq.configs": "configs", "lln_fairseq.data_prep": "data_prep"}  # where they are in a checkout

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
    # ve-fairseq, the fairseq that runs on current Pythons, has wheels for these two only.
    python_requires=">=3.11,<3.13",
    install_requires=[
        "torch>=2.6",
        'triton>=3.4; platform_system == "Linux"',
        "ve-fairseq==0.12.3",
        "hydra-core>=1.3.2,<1.4",
        "sentencepiece>=0.2",
        "tiktoken>=0.8",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "scipy>=1.11",
        "threadpoolctl>=3.1",
        "tqdm>=4.66",
    ],
    extras_require={"test": ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff==0.17.5", "mypy==2.4.1"]},
)
