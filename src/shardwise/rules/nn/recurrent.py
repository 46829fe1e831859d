"""Recurrent layers and the loss that often follows them: the batch is free, time and features are not.

Torch makes a layer of thousands of small ops, a few per step in time. Here it is one op, planned once, so that the
shards run torch's own fused layer. Dropout between layers draws random numbers: such layers are one op each.

Nor are weights: a step needs all of the state before it, so ranks that had some of the hidden units each would gather
the state in every step. That is more than the weights unless sequences are short and batches small, it is as
many collectives as there are steps, and the fused layer is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import unless_empty
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.treatments import traced_form
from shardwise.rules.kit.types import Call, HeldValues, Local, Lowering, Rule, Strategy, flat_values, replicated

SCHEMA = (
    "Tensor input, {hx} hx, Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, "
    "bool bidirectional, bool batch_first"
)


def _layer(call: Call) -> list[Strategy]:
    if call["input"].ndim != 3:
        return [replicated(call)]
    batch = 0 if call["batch_first"] else 1
    states = len(flat_values(call["hx"]))
    params = [None] * len(call["params"])
    return [replicated(call), Strategy((batch, *[1] * states, *params), (batch, *[1] * states))]


def _layer_local(function: Callable) -> Lowering:
    return lambda call, ins, outs: unless_empty(call, outs, Local(function, call.args))


def _one_step(function: Callable) -> Callable[..., tuple[Tensor, ...]]:
    """The layer on meta tensors, with all of torch's checks: one step is as good as many."""

    def meta(x: Tensor, hx: Any, params: Any, *settings: Any) -> tuple[Tensor, ...]:
        time = 1 if settings[-1] else 0
        if x.dim() != 3 or x.shape[time] < 2:
            return function(x, hx, params, *settings)
        out, *states = function(x.narrow(time, 0, 1), hx, params, *settings)
        shape = list(out.shape)
        shape[time] = x.shape[time]
        return out.new_empty(shape), *states

    return meta


def _is_plain(x: Tensor, hx: Any, params: Any, *settings: Any, **named: Any) -> bool:
    """Whether a layer draws no random numbers, and has all arguments by position."""
    if isinstance(hx, Tensor) and not hx.is_floating_point():
        raise NotImplementedError("packed sequences are gathered, and torch has no kernel of them for the meta device")
    if named or len(settings) != 6:
        return False
    _, num_layers, dropout, train, _, _ = settings
    return not (dropout and train and num_layers > 1)


def _one_by_one(function: Callable) -> Callable[..., tuple[Tensor, ...]]:
    """Several layers with dropout between them: each is one op."""

    def run(x: Tensor, hx: Any, params: Any, *settings: Any, **named: Any) -> tuple[Tensor, ...]:
        if named or len(settings) != 6:
            return function(x, hx, params, *settings, **named)
        has_biases, num_layers, dropout, _, bidirectional, batch_first = settings
        states, layer = hx if isinstance(hx, (list, tuple)) else [hx], traced_form(function)
        split = [state.chunk(num_layers) for state in states]
        each = len(params) // num_layers
        found = []
        for number in range(num_layers):
            x = torch.dropout(x, dropout, True) if number else x
            first = [parts[number] for parts in split]
            own = params[number * each : (number + 1) * each]
            state = first if isinstance(hx, (list, tuple)) else first[0]
            x, *last = layer(x, state, own, has_biases, 1, 0.0, True, bidirectional, batch_first)
            found.append(last)
        return x, *(torch.cat(parts) for parts in zip(*found, strict=True))

    return run


for _function, _states in ((torch.lstm, 2), (torch.gru, 1), (torch.rnn_tanh, 1), (torch.rnn_relu, 1)):
    register_function(
        _function,
        SCHEMA.format(hx="Tensor[]" if _states == 2 else "Tensor") + f" -> ({', '.join(['Tensor'] * (_states + 1))})",
        rule=Rule(_layer, _layer_local(_function)),
        meta=_one_step(_function),
        traced_if=_is_plain,
        otherwise=_one_by_one(_function),
    )


# Connectionist temporal classification. The lengths are lists, of which each rank takes its part


def _ctc_loss(call: Call) -> list[Strategy]:
    if call["log_probs"].ndim != 3 or flat_values(call["input_lengths"]):
        return [replicated(call)]
    targets = 0 if call["targets"].ndim == 2 else None
    return [replicated(call), Strategy((1, targets), (0, 0))]


def _ctc_loss_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    if not ins[0].splits[1]:
        return None
    inputs, targets = list(call["input_lengths"]), list(call["target_lengths"])
    own = []
    for (_, start, _), (_, size, _) in (ins[0].box(coordinate) for coordinate in ins[0].mesh.held):
        before, here = sum(targets[:start]), targets[start : start + size]
        own.append((inputs[start : start + size], here, before, sum(here)))
    args = [call["log_probs"], call["targets"], HeldValues(own), outs[1].shape[2], call["blank"], call["zero_infinity"]]
    return unless_empty(call, outs, Local(_local_ctc_loss, args))


def _local_ctc_loss(
    log_probs: Tensor, targets: Tensor, own: Any, width: int, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Targets may be joined into one row; and the table of partial sums is as wide as the longest target of all."""
    input_lengths, target_lengths, start, length = own
    if targets.dim() == 1:
        targets = targets.narrow(0, start, length)
    loss, table = torch._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return loss, F.pad(table.detach(), (0, width - table.shape[2]), value=-math.inf)


register("_ctc_loss", rule=Rule(_ctc_loss, _ctc_loss_local))
