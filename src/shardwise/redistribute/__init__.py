"""Redistribution: the transition table, its prices, the planner and the executor."""

from shardwise.redistribute.backward.deferred_gradients import (
    alone,
    check_reduced,
    drop,
    flush,
    is_keeping,
    no_sync,
    reduced_apart,
    unreduced,
)
from shardwise.redistribute.backward.double_backward import anchors, let_go, tied, trail
from shardwise.redistribute.backward.graph_boundary import CastBackward, MoveGradient
from shardwise.redistribute.backward.ownership import own_node
from shardwise.redistribute.backward.reach import below, handed_out, is_ours
from shardwise.redistribute.collectives import Group
from shardwise.redistribute.cost import LATENCY, LOCAL, group_size, transition_cost, wire_bytes
from shardwise.redistribute.disjoint import DISJOINT, Disjoint, Rows, as_sum
from shardwise.redistribute.execute import (
    differentiable,
    in_place,
    recorded,
    run_path,
    second_order,
    transition,
)
from shardwise.redistribute.gathered import Gathered, LookedUp
from shardwise.redistribute.in_flight import start_path
from shardwise.redistribute.joint_exchange import can_join, run_together
from shardwise.redistribute.masks import joined
from shardwise.redistribute.move_cache import forget, recall, remember, windows
from shardwise.redistribute.planner import parameter_moves, path_bytes, path_cost, plan_moves
from shardwise.redistribute.transitions import DUAL, TABLE, Move, Typed

__all__ = [
    "DISJOINT",
    "DUAL",
    "LATENCY",
    "LOCAL",
    "TABLE",
    "CastBackward",
    "Disjoint",
    "Gathered",
    "Group",
    "LookedUp",
    "Move",
    "MoveGradient",
    "Rows",
    "Typed",
    "alone",
    "anchors",
    "as_sum",
    "below",
    "can_join",
    "check_reduced",
    "differentiable",
    "drop",
    "flush",
    "is_keeping",
    "forget",
    "group_size",
    "handed_out",
    "in_place",
    "is_ours",
    "joined",
    "let_go",
    "no_sync",
    "own_node",
    "parameter_moves",
    "path_bytes",
    "path_cost",
    "plan_moves",
    "recall",
    "recorded",
    "remember",
    "run_path",
    "run_together",
    "second_order",
    "start_path",
    "tied",
    "trail",
    "transition",
    "transition_cost",
    "reduced_apart",
    "unreduced",
    "windows",
    "wire_bytes",
]
