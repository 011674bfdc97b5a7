"""Truth for the indexer: logits in fp32 or better, then a stable top-k, in plain torch."""

import torch

from dsv4_sm120 import layout


def indexer_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """``k_scale[t] * sum_h relu(k[t] . q[h]) * weights[h]`` of every row, as ``rows`` tensors of ``[seq_len]``.

    ``q`` e4m3 ``[rows, 1, 64, 128]``; ``kv_cache`` as in ``layout.pack_indexer_k``; ``weights`` fp32 ``[rows, 64]``;
    ``seq_lens`` int32 ``[rows]`` in compressed tokens; ``page_table`` int32 ``[rows, pages]``.
    """
    logits = []
    for row, length in enumerate(seq_lens.tolist()):
        position = torch.arange(length, device=q.device)
        page = page_table[row, position // layout.INDEXER_PAGE_SIZE].long()
        slots = page * layout.INDEXER_PAGE_SIZE + position % layout.INDEXER_PAGE_SIZE
        keys, scale = layout.unpack_indexer_k(kv_cache, slots)
        scores = (keys.to(dtype) @ q[row, 0].to(dtype).T).relu()
        logits.append(scores @ weights[row].to(dtype) * scale.to(dtype))
    return logits


def topk_transform(
    logits: list[torch.Tensor], page_table: torch.Tensor, k: int, page_size: int = layout.INDEXER_PAGE_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best positions of each row, ascending, and their slots: int32 ``[rows, k]`` each, -1 filled.

    Of equal logits the lower position wins.
    """
    positions = torch.full((len(logits), k), -1, dtype=torch.int32, device=page_table.device)
    slots = positions.clone()
    for row, scores in enumerate(logits):
        best = torch.sort(scores, descending=True, stable=True).indices[:k].sort().values
        positions[row, : len(best)] = best.int()
        slots[row, : len(best)] = (page_table[row, best // page_size] * page_size + best % page_size).int()
    return slots, positions
