"""Backward passes and what belongs to them: hooks, checkpoints, gradients of gradients, optimizers."""

from __future__ import annotations

import torch

from shardwise.proof.fuzz.calls import elementwise, layers, products, reductions, shapes
from shardwise.proof.fuzz.draw import Draw, Maker, Refused, Var
from shardwise.proof.fuzz.program import Line

LOSSES = "{x}.sum() | {x}.sin().sum() | ({x} * {x}).sum() | {x}.mean() | {x}.tanh().sum()"
OPTIMIZERS = """
SGD({p}, lr=0.1, weight_decay=0.1{o}) | AdamW({p}, lr=0.1, weight_decay=0.1, eps=0.1{o})
SGD({p}, lr=0.1, momentum=0.9{o})
"""
INSIDE: tuple[Maker, ...] = (
    *(elementwise.unary, elementwise.unary, elementwise.binary, elementwise.kinked, products.matmul, products.linear),
    *(reductions.reduction, reductions.extremum, shapes.view, shapes.slices, layers.normalised, products.gram),
)
"""Calls that may stand inside others, where nothing but their result is seen."""


def _loss(d: Draw, x: Var) -> str:
    return d.way(LOSSES).format(x=x)


def _recorded(d: Draw, *dims: int) -> Var:
    """A result with a history."""
    found = d.some(lambda x: x.dtype.is_floating_point and x.value.requires_grad and not x.value.is_leaf)
    if found is None:
        raise Refused("nothing needs a gradient")
    return found


def hook(d: Draw) -> Line:
    x = d.tensor(0, 1, 2, 3, fits=lambda v: v.value.requires_grad)
    return Line(f"{x}.register_hook(lambda g: {d.pick('g * 2', 'None', 'g + 0.5', 'g.tanh()')})")


def retain(d: Draw) -> Line:
    return Line(f"{_recorded(d)}.retain_grad()")


def backward(d: Draw) -> Line:
    return Line(f"{_loss(d, _recorded(d))}.backward(retain_graph=True)")


def two_backwards(d: Draw) -> Line:
    """Two losses of one result."""
    x = _recorded(d)
    return Line(f"{_loss(d, x)}.backward(retain_graph=True); {_loss(d, x)}.backward(retain_graph=True)")


def gradient(d: Draw) -> str:
    x = _recorded(d)
    sources = [v for v in d.pool if v.value.requires_grad and v.dtype.is_floating_point]
    wanted = d.chance.sample(sources, min(len(sources), d.pick(1, 1, 2)))
    create = d.pick("create_graph=True", "retain_graph=True")
    return f"torch.autograd.grad({_loss(d, x)}, [{', '.join(wanted)}], {create}, allow_unused=True)"


def checkpointed(d: Draw) -> str:
    """A few calls inside one another, recomputed in the backward pass."""
    outer = [d.tensor(1, 2, 3) for _ in range(d.pick(1, 2))]
    arguments = [Var.of(f"a{i}", x.value) for i, x in enumerate(outer)]
    body = nested(d, arguments)
    names = ", ".join(arguments)
    return f"checkpoint(lambda {names}: {body}, {', '.join(outer)}, use_reentrant={d.likely(0.5)})"


def nested(d: Draw, arguments: list[Var]) -> Var:
    """An expression of two or three calls, of which each takes the result of the one before."""
    scope = {**d.run.names, **{str(x): x.value for x in arguments}}
    d.inner, made = list(arguments), arguments[0]
    try:
        for _ in range(d.pick(2, 3)):
            text = f"({d.pick(*INSIDE)(d)})"
            made = Var.of(text, eval(text, scope))
            if not hasattr(made.value, "shape"):
                raise Refused("several results")
            d.inner = [made, *arguments] if d.likely(0.8) else [made]
    finally:
        d.inner = None
    return made


def unrecorded(d: Draw) -> Line:
    """A result that is not recorded. (Of a view torch says that it requires a gradient, and then loses it.)"""
    name, text = d.name(), d.pick(*INSIDE)(d)
    with torch.no_grad():
        if eval(text, d.run.names).requires_grad:
            raise Refused("a view")
    return Line(f"with torch.no_grad(): {name} = {text}", (name,))


def optimize(d: Draw) -> Line:
    """A step of an optimizer, with parameters that the loss may not have used."""
    leaves = [x for x in d.pool if x.value.is_leaf and x.value.requires_grad]
    if not leaves:
        raise Refused("nothing to optimize")
    made = d.way(OPTIMIZERS)
    made = made.format(p=f"[{', '.join(leaves)}]", o=d.pick("", ", foreach=True", ", foreach=False"))
    name = d.name("o")
    after = d.pick("", f"; {name}.step()", f"; {name}.zero_grad()")
    return Line(f"{name} = torch.optim.{made}; {name}.step(){after}", (name,))


def clipping(d: Draw) -> Line:
    leaves = [x for x in d.pool if x.value.is_leaf and x.value.grad is not None]
    return Line(f"torch.nn.utils.clip_grad_norm_([{', '.join(leaves)}], 0.5)")


def final(d: Draw) -> Line:
    """One loss of several results."""
    found = [x for x in d.pool if x.dtype.is_floating_point and x.value.requires_grad and not x.value.is_leaf]
    if not found:
        raise Refused("nothing needs a gradient")
    losses = [_loss(d, x) for x in d.chance.sample(found, min(len(found), d.pick(1, 2, 3)))]
    return Line(f"({' + '.join(losses)}).backward()")


CALLS: tuple[Maker, ...] = (
    hook,
    hook,
    *[retain] * 3,
    backward,
    two_backwards,
    gradient,
    gradient,
    *[checkpointed] * 3,
    unrecorded,
)
