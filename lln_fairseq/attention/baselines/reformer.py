"""Reformer: softmax over the keys with a similar hash (Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.context import NO_CONTEXT, Context
from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.autocast import autocast_disabled
from lln_fairseq.ops.formula import clear_padding, compute_dtype, explicit_mask


@dataclass
class ReformerConfig:
    chunk_size: int = option(64, "m, queries in a chunk, which attends to 3 m keys", at_least=1)
    hashes: int = option(4, "rounds of hashing", at_least=1)


@register_attention("reformer", ReformerConfig)
class ReformerAttention(Attention):
    """LSH attention: P_ij = c_ij e^{q_i·k_j / √D} / Σ_l c_il e^{q_i·k_l / √D}.

    c_ij is the number of rounds of hashing in which query i attends to key j. In every round, the queries and the keys
    are assigned to buckets h(x) = argmax [xR, -xR] with a random matrix R (section 2 of the paper), and sorted by
    bucket. m = `chunk_size` consecutive sorted queries form a chunk. The chunk attends to 3 m consecutive sorted keys,
    centered on the bucket of its middle query. Rounds are weighted by their sums of exponentials.

    As in the published code, a key counts twice if a query attends to it in two rounds. The 3 m keys also count if they
    are in other buckets than the query. A sequence of at most 3 m tokens therefore gets exact softmax attention.

    The paper sets k = q / |q|, sorts each query together with its key and masks the diagonal. Here the keys are
    independent of the queries, both are sorted separately, and the diagonal is not masked.

    A sequence of n tokens, not counting padding, has 2 ⌈n / 2m⌉ buckets. Its padding is sorted to the end, so the
    result does not depend on the rest of the batch. During training, every forward pass draws a new R. In evaluation
    mode R is fixed: it is drawn from a seed that the constructor chooses and that is saved.
    """

    config: ReformerConfig
    rotations: Tensor  # R of every round, (hashes, H, D, directions)

    def __init__(
        self, config: ReformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.seed = int(torch.randint(2**31 - 1, ()))
        # The seed is saved instead of R, because a model for another length has another number of directions.
        self.register_buffer("rotations", self._draw_rotations(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context = NO_CONTEXT) -> Tensor:
        q, k, v = clear_padding(q, k, v, context.padding)
        padding = explicit_mask(context.padding, q)
        rotations = self.rotations
        if self.training:
            rotations = torch.randn_like(self.rotations)
        rounds = [self._hash_round(q, k, v, rotation, padding) for rotation in rotations]
        outs = torch.stack([out for out, _ in rounds])
        log_sums = torch.stack([log_sum for _, log_sum in rounds])
        weights = log_sums.softmax(dim=0).to(v.dtype)
        out = (weights[..., None] * outs).sum(dim=0)
        return out.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)

    def _hash_round(self, q: Tensor, k: Tensor, v: Tensor, rotation: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of one round of hashing, and the logsumexp of the scores of every query, (B, H, N).

        `rotation` is R, (H, D, directions). Queries and keys are numbered as tokens, from 0 to N - 1. A query also has
        a place among the sorted queries, from 0 to chunks · m - 1, where chunk c has the places c m to c m + m - 1.
        """
        length = q.shape[2]
        q_bucket = self.buckets(q, rotation, padding)
        k_bucket = self.buckets(k, rotation, padding)
        query_at_place, keys_of_chunk, is_attended = self._chunk_keys(q_bucket, k_bucket, padding)
        num_chunks = keys_of_chunk.shape[2]

        queries = _gather_rows(q, query_at_place.clamp(max=length - 1)) * self.head_dim**-0.5
        keys = _gather_rows(k, keys_of_chunk.flatten(2)).unflatten(2, keys_of_chunk.shape[2:])
        scores = queries.unflatten(2, (num_chunks, self.config.chunk_size)) @ keys.mT
        scores = scores.to(compute_dtype(q.dtype)).masked_fill(~is_attended[:, :, :, None], float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1).to(v.dtype), self.active_dropout)
        values = _gather_rows(v, keys_of_chunk.flatten(2)).unflatten(2, keys_of_chunk.shape[2:])
        out_at_place = (weights @ values).flatten(2, 3)
        log_sum_at_place = scores.logsumexp(dim=-1).flatten(2)

        place_of_query = query_at_place.argsort(dim=-1)[:, :, :length]
        return _gather_rows(out_at_place, place_of_query), log_sum_at_place.gather(2, place_of_query)

    def buckets(self, x: Tensor, rotation: Tensor, padding: Tensor) -> Tensor:
        """Return the bucket of every query or key x (B, H, N, D), int64 (B, H, N), from 0 to 2 · directions - 1.

        A sequence of n non-padding tokens uses the first ⌈n / 2m⌉ directions of the rotation R, (H, D, directions).
        Padding tokens get 2 · directions, so they are sorted to the end.
        """
        with autocast_disabled(x):
            projected = x.float() @ rotation.float()  # (B, H, N, directions)
        num_directions = projected.shape[-1]
        tokens_per_direction = 2 * self.config.chunk_size
        num_real = (~padding).sum(dim=1, keepdim=True)
        first_token = torch.arange(num_directions, device=x.device) * tokens_per_direction
        is_unused = first_token >= num_real.clamp(min=1)
        best = projected.abs().masked_fill(is_unused[:, None, None, :], -1.0).argmax(dim=-1, keepdim=True)
        bucket = best + num_directions * (projected.gather(-1, best) < 0)
        return bucket[..., 0].masked_fill(padding[:, None, :], 2 * num_directions)

    def _chunk_keys(self, q_bucket: Tensor, k_bucket: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the keys that every chunk of sorted queries attends to.

        Returns:
            A tuple of three tensors: first the query at every place among the sorted queries, (B, H, chunks · m), which
            end with numbers of N or more if m does not divide N. Second the keys of every chunk, (B, H, chunks, 3 m).
            Third bool (B, H, chunks, 3 m), which is False for the keys to ignore: a sequence of fewer than 3 m tokens
            has fewer keys than that.
        """
        length = padding.shape[1]
        m = self.config.chunk_size
        num_chunks = -(-length // m)
        padding_bucket = 2 * self.rotations.shape[-1]
        q_padded = F.pad(q_bucket, (0, num_chunks * m - length), value=padding_bucket)
        q_sorted, query_at_place = q_padded.sort(dim=-1, stable=True)
        k_sorted, key_at_place = k_bucket.sort(dim=-1, stable=True)
        num_real = (~padding).sum(dim=1)[:, None, None]
        middle = torch.arange(num_chunks, device=padding.device) * m + m // 2
        middle = middle.minimum(num_real - 1).clamp(min=0).expand(*q_sorted.shape[:2], -1)
        middle_bucket = q_sorted.gather(2, middle)
        # The center of the keys in this bucket. If there are none, the place where they would be.
        bucket_start = torch.searchsorted(k_sorted, middle_bucket)
        bucket_end = torch.searchsorted(k_sorted, middle_bucket, right=True)
        center = (bucket_start + bucket_end) // 2
        start = (center - 3 * m // 2).minimum(num_real - 3 * m).clamp(min=0)
        place = start[..., None] + torch.arange(3 * m, device=padding.device)
        # A sequence that is all padding attends to its padding. The softmax would otherwise be 0/0.
        num_keys = num_real[..., None].masked_fill(num_real[..., None] == 0, length)
        is_attended = place < num_keys
        keys_of_chunk = key_at_place.gather(2, place.clamp(max=length - 1).flatten(2)).view_as(place)
        return query_at_place, keys_of_chunk, is_attended

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the seed and draw the rotations from it again, in place."""
        self.seed = int(state)
        self.rotations.copy_(self._draw_rotations())

    def _draw_rotations(self) -> Tensor:
        """Draw R for every round from the seed: float32 (hashes, H, D, ⌈max_positions / 2m⌉) on the CPU."""
        num_directions = -(-self.max_positions // (2 * self.config.chunk_size))
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.config.hashes, self.num_heads, self.head_dim, num_directions, generator=generator)


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` (B, H, M) of x (B, H, N, D), which is (B, H, M, D)."""
    batch, heads, length, dim = x.shape
    first_row = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * length
    # The gradient of `gather` is slow.
    return F.embedding(index + first_row, x.reshape(-1, dim))
