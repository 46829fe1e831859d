"""Multi-head attention, written so that batch and heads stay apart.

Torch merges them into one dim, of which a shard by heads is every so many rows: no layout says that.
"""

from __future__ import annotations

import inspect
import math
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.rules.kit.treatments import treat

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def by_heads(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`, of arguments that it accepts."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    is_batched = call.query.dim() == 3
    if not is_batched:
        call.query, call.key, call.value = (x.unsqueeze(1) for x in (call.query, call.key, call.value))
    q, k, v = _projected(call)
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    mask = _mask(None if is_causal else call.attn_mask, call.key_padding_mask, q, k.shape[2])
    dropout_p = call.dropout_p if call.training else 0.0
    weights = _weights(q, k, mask, dropout_p) if call.need_weights else None
    if weights is None:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    else:
        mixed = weights @ v
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), call.out_proj_weight, call.out_proj_bias)
    if weights is not None and call.average_attn_weights:
        weights = weights.mean(1)
    if is_batched:
        return out, weights
    return out.squeeze(1), None if weights is None else weights.squeeze(0)


def _projected(call: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as [batch, head, row, feature], with the rows that are added to keys and values."""
    separate = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    weights = separate if call.use_separate_proj_weight else call.in_proj_weight.chunk(3)
    biases = call.in_proj_bias.chunk(3) if call.in_proj_bias is not None else (None,) * 3
    operands = zip((call.query, call.key, call.value), weights, biases, strict=True)
    q, k, v = (F.linear(x, weight, bias) for x, weight, bias in operands)
    k, v = _with_row(k, call.bias_k), _with_row(v, call.bias_v)
    q, k, v = (x.unflatten(-1, (call.num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (
        x if given is None else given.unflatten(0, x.shape[:2]) for x, given in ((k, call.static_k), (v, call.static_v))
    )
    if call.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return q, k, v


def _with_row(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else torch.cat([x, bias.repeat(1, x.shape[1], 1)])


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
    """A mask as numbers, zero for the columns that the function has added itself."""
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


treat(F.multi_head_attention_forward, unmerged=_checked)
treat(_checked, keeps_composites=True)
