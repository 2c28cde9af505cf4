"""Checkpoint compatibility: what fairseq puts into its files, loaded without switching torch's safety off."""

import argparse
import collections
import typing

import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

# argparse.Namespace: checkpoints of models without a dataclass, the stock RoBERTa among them. The others travel from
# the first worker to the rest when several workers resume.
FAIRSEQ_CLASSES = (
    argparse.Namespace,
    _TensorPlaceholder,
    DictConfig,
    ListConfig,
    AnyNode,
    Metadata,
    ContainerMetadata,
    collections.defaultdict,
    typing.Any,
    dict,
    list,
    int,
)


def allow_fairseq_checkpoints() -> None:
    """Adds the classes above to those that torch.load accepts with weights_only, its safe default."""
    torch.serialization.add_safe_globals(list(FAIRSEQ_CLASSES))
