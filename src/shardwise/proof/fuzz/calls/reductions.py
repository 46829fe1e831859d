"""Calls that make fewer numbers of many, and scans."""

from __future__ import annotations

from shardwise.proof.fuzz.draw import Draw, apart, off

WAYS = """
{x}.sum({d}) | {x}.sum({d}, keepdim=True) | {x}.mean({d}) | {x}.mean({d}, keepdim=True) | {x}.sum() | {x}.mean()
{x}.logsumexp({d}) | {x}.logsumexp({d}, keepdim=True) | {x}.prod({d}) | {x}.prod() | {x}.cumsum({d})
torch.cumprod({x}, {d}) | {x}.logcumsumexp({d}) | torch.trapezoid({x}, dim={d}) | torch.diff({x}, dim={d})
{x}.softmax({d}) | {x}.log_softmax({d}) | F.softmin({x}, {d}) | {x}.nansum({d})
"""
NORMS = """
{x}.norm() | {x}.norm(dim={d}) | torch.linalg.vector_norm({x}, 3) | {x}.norm(1, {d}) | torch.linalg.norm({x})
F.normalize({x}, dim={d}) | torch.linalg.vector_norm({x}, 2, {d}, keepdim=True) | {x}.var({d})
{x}.std({d}, keepdim=True) | {x}.var() | torch.var_mean({x}, {d}) | {x}.var({d}, correction=0)
F.cosine_similarity({x}, {x} + 1, {d})
"""
EXTREMA = "{x}.amax({d}) | {x}.amin({d}, keepdim=True) | {x}.max({d}).values | {x}.amax() | {x}.min() | {x}.cummax({d})"


def reduction(d: Draw) -> str:
    x = d.tensor(1, 2, 3, 4)
    return d.way(WAYS).format(x=x, d=d.dim(x))


def several(d: Draw) -> str:
    x = d.tensor(2, 3, 4)
    dims = tuple(sorted(d.chance.sample(range(x.ndim), 2)))
    way = d.way("{x}.sum({d}) | {x}.mean({d}, keepdim=True) | {x}.amax({d}) | {x}.logsumexp({d})")
    return way.format(x=apart(x), d=dims)


def norm(d: Draw) -> str:
    x = off(d.tensor(1, 2, 3))
    return d.way(NORMS).format(x=x, d=d.dim(x))


def extremum(d: Draw) -> str:
    x = apart(d.tensor(1, 2, 3))
    return d.way(EXTREMA).format(x=x, d=d.dim(x))


CALLS = (*[reduction] * 5, several, *[norm] * 2, *[extremum] * 2)
