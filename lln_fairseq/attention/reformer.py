"""Reformer: softmax over the keys of similar hash (Kitaev, Kaiser and Levskaya 2020, arXiv 2001.04451)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln_fairseq.attention.registry import Attention, option, register_attention
from lln_fairseq.ops.dtypes import compute_dtype
from lln_fairseq.ops.padding import clear_padding, explicit_mask


@dataclass
class ReformerConfig:
    chunk_size: int = option(64, "m, the queries of a chunk, which meet 3 m keys", at_least=1)
    hashes: int = option(4, "rounds of hashing", at_least=1)


@register_attention("reformer", ReformerConfig)
class ReformerAttention(Attention):
    """LSH attention: P_ij = c_ij e^{q_i·k_j / √D} / Σ_l c_il e^{q_i·k_l / √D}, c_ij the rounds in which i meets j.

    Every round hashes queries and keys by h(x) = argmax [xR, -xR], R random (section 2), and sorts both by their hash.
    A chunk of m sorted queries meets the 3 m sorted keys around the bucket of its middle query. The rounds are weighed
    by their sums of exponentials. As in the published code, a key met twice counts twice, and the keys of other buckets
    in reach are not left out. A sentence of up to 3 m tokens thus gets exact softmax attention.

    The paper sets k = q / |q|, so that queries and keys of a bucket share a chunk, and masks the diagonal. Here keys
    are given: they are sorted on their own and found by the number of their bucket; lengths do not change a hash.

    A sentence of n tokens has 2 ⌈n / 2m⌉ buckets and its padding sorts last, so it is the same in any batch. While
    training, every forward draws its own R. Evaluation uses one R, drawn on construction from a seed that is saved.
    """

    config: ReformerConfig
    rotations: Tensor

    def __init__(
        self, config: ReformerConfig, num_heads: int, head_dim: int, max_positions: int, dropout: float
    ) -> None:
        super().__init__(config, num_heads, head_dim, max_positions, dropout)
        self.seed = int(torch.randint(2**31 - 1, ()))
        # The seed is saved in its place: a model for other lengths has another number of directions.
        self.register_buffer("rotations", self._draw(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = clear_padding(q, k, v, key_padding_mask)
        padding = explicit_mask(key_padding_mask, q)
        rotations = torch.randn_like(self.rotations) if self.training else self.rotations
        rounds = [self._round(q, k, v, rotation, padding) for rotation in rotations]
        outs, log_sums = (torch.stack(x) for x in zip(*rounds, strict=True))
        weights = log_sums.softmax(dim=0).to(v.dtype)
        out = (weights[..., None] * outs).sum(dim=0)
        return out.masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)

    def _round(self, q: Tensor, k: Tensor, v: Tensor, rotation: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Attention by one hash: the output (B, H, N, D) and the logsumexp (B, H, N) of every query."""
        q_bucket, k_bucket = (self.buckets(x, rotation, padding) for x in (q, k))
        order, keys, met = self._meetings(q_bucket, k_bucket, padding)
        queries = _rows(q, order.clamp(max=q.shape[2] - 1)) * self.head_dim**-0.5
        chunks, m = keys.shape[2], self.config.chunk_size
        scores = queries.unflatten(2, (chunks, m)) @ _rows(k, keys.flatten(2)).unflatten(2, keys.shape[2:]).mT
        scores = scores.to(compute_dtype(q.dtype)).masked_fill(~met[:, :, :, None], float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1).to(v.dtype), self.active_dropout)
        out = weights @ _rows(v, keys.flatten(2)).unflatten(2, keys.shape[2:])
        back = order.argsort(dim=-1)[:, :, : q.shape[2]]
        return _rows(out.flatten(2, 3), back), scores.logsumexp(dim=-1).flatten(2).gather(2, back)

    def buckets(self, x: Tensor, rotation: Tensor, padding: Tensor) -> Tensor:
        """The hash of each token, (B, H, N), in as many directions as its sentence uses; padding comes after all."""
        with torch.autocast(x.device.type, enabled=False):
            turned = x.float() @ rotation.float()  # (B, H, N, directions)
        directions, pair = turned.shape[-1], 2 * self.config.chunk_size
        tokens = (~padding).sum(dim=1, keepdim=True)
        unused = torch.arange(directions, device=x.device) * pair >= tokens.clamp(min=1)
        best = turned.abs().masked_fill(unused[:, None, None, :], -1.0).argmax(dim=-1, keepdim=True)
        bucket = best + directions * (turned.gather(-1, best) < 0)
        return bucket[..., 0].masked_fill(padding[:, None, :], 2 * directions)

    def _meetings(self, q_bucket: Tensor, k_bucket: Tensor, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Who meets whom.

        Returns: the queries (B, H, chunks · m) in sorted order, filled up with numbers beyond N - 1; for each of their
        chunks its keys (B, H, chunks, 3 m); and which of these there are.
        """
        length, m = padding.shape[1], self.config.chunk_size
        chunks = -(-length // m)
        beyond = 2 * self.rotations.shape[-1]
        q_sorted, q_order = F.pad(q_bucket, (0, chunks * m - length), value=beyond).sort(dim=-1, stable=True)
        k_sorted, k_order = k_bucket.sort(dim=-1, stable=True)
        tokens = (~padding).sum(dim=1)[:, None, None]
        middle = torch.arange(chunks, device=padding.device) * m + m // 2
        middle = q_sorted.gather(2, middle.minimum(tokens - 1).clamp(min=0).expand(*q_sorted.shape[:2], -1))
        # The middle of the keys in the bucket, or of the gap where they would be.
        centre = (torch.searchsorted(k_sorted, middle) + torch.searchsorted(k_sorted, middle, right=True)) // 2
        start = (centre - 3 * m // 2).minimum(tokens - 3 * m).clamp(min=0)
        place = start[..., None] + torch.arange(3 * m, device=padding.device)
        # A sentence that is all padding meets its padding: the softmax would otherwise be 0/0.
        met = place < tokens[..., None].masked_fill(tokens[..., None] == 0, length)
        keys = k_order.gather(2, place.clamp(max=length - 1).flatten(2)).view_as(place)
        return q_order, keys, met

    def attention_matrix(self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """P in evaluation, by counting the meetings of every chunk one after the other. The hashes are forward's."""
        padding = explicit_mask(key_padding_mask, q)
        length, m = q.shape[2], self.config.chunk_size
        met = torch.zeros(*q.shape[:3], length, dtype=q.dtype, device=q.device)
        for rotation in self.rotations:
            hashes = [self.buckets(x, rotation, padding).tolist() for x in (q, k)]
            for b, h in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
                q_hash, k_hash = hashes[0][b][h], hashes[1][b][h]
                real = int((~padding[b]).sum())
                queries, keys = (sorted(range(length), key=x.__getitem__) for x in (q_hash, k_hash))
                for first in range(0, length, m) if real else ():
                    bucket = q_hash[queries[min(first + m // 2, real - 1)]]
                    centre = (sum(x < bucket for x in k_hash) + sum(x <= bucket for x in k_hash)) // 2
                    start = max(0, min(centre - 3 * m // 2, real - 3 * m))
                    rows = torch.tensor(queries[first : first + m])[:, None]
                    met[b, h, rows, torch.tensor(keys[start : min(start + 3 * m, real)])] += 1
        scores = q @ k.mT / self.head_dim**0.5 + met.log()
        return scores.softmax(dim=-1).masked_fill(padding.all(dim=1)[:, None, None, None], 0.0)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seed)

    def set_extra_state(self, state: Tensor) -> None:
        self.seed = int(state)
        self.rotations.copy_(self._draw())

    def _draw(self) -> Tensor:
        """R (hashes, H, D, directions), a direction for every two buckets of the longest sentence."""
        directions = -(-self.max_positions // (2 * self.config.chunk_size))
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.config.hashes, self.num_heads, self.head_dim, directions, generator=generator)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, N, D), index (B, H, M) -> the rows (B, H, M, D), as an embedding: the gradient of gather is slow."""
    batch, heads, length, dim = x.shape
    table = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * length
    return F.embedding(index + table, x.reshape(-1, dim))
