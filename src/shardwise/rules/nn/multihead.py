"""Multi-head attention, written so that batch and heads stay apart.

Torch merges them into one dim, of which a shard by heads is every so many rows: no layout says that.
"""

from __future__ import annotations

import math
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.rules.kit.treatments import treat


def by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`, of what it accepts."""
    is_batched = query.dim() == 3
    if not is_batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None,) * 3
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    k, v = _with_row(k, bias_k), _with_row(v, bias_v)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (_given_or(x, given) for x, given in ((k, static_k), (v, static_v)))
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = _mask(None if is_causal else attn_mask, key_padding_mask, q, k.shape[2])
    dropped = dropout_p if training else 0.0
    if need_weights:
        found = _weights(q, k, mask, dropped)
        mixed = found @ v
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    out = out if is_batched else out.squeeze(1)
    if not need_weights:
        return out, None
    found = found.mean(1) if average_attn_weights else found
    return out, found if is_batched else found.squeeze(0)


def _with_row(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else torch.cat([x, bias.repeat(1, x.shape[1], 1)])


def _given_or(x: Tensor, given: Tensor | None) -> Tensor:
    """What was projected, or what was given in its place, batch and heads merged."""
    return x if given is None else given.unflatten(0, x.shape[:2])


def _mask(mask: Tensor | None, padding: Tensor | None, q: Tensor, num_columns: int) -> Tensor | None:
    """Both masks in one, to be added: of rows and columns, or of these in each head; and of each batch's columns."""
    found = None
    if mask is not None:
        mask = _additive(mask, q.dtype, num_columns)
        found = mask.unflatten(0, q.shape[:2]) if mask.dim() == 3 else mask[None, None]
    if padding is not None:
        padding = _additive(padding, q.dtype, num_columns).view(q.shape[0], 1, 1, -1)
        found = padding if found is None else found + padding
    return found


def _additive(mask: Tensor, dtype: torch.dtype, num_columns: int) -> Tensor:
    """A mask as numbers. Columns that the function has added itself are seen."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    added = num_columns - mask.shape[-1]
    return F.pad(mask, (0, added)) if added else mask


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    found = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
    found = (found if mask is None else found + mask).softmax(-1)
    return F.dropout(found, dropout_p) if dropout_p else found


@wraps(F.multi_head_attention_forward)
def _checked(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The same, after torch's own checks: it does nothing else to meta tensors."""
    with _disable_current_modes():
        F.multi_head_attention_forward(*args, **kwargs)
    return by_heads(*args, **kwargs)


treat(F.multi_head_attention_forward, apart=_checked)
treat(_checked, keeps_composites=True)
