"""The `shardwise` command. Each subcommand is a module with a docstring, `add_arguments(parser)` and `run(options)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from shardwise.checkpoint import command as checkpoint
from shardwise.proof.coverage import command as coverage
from shardwise.proof.fuzz import command as fuzz
from shardwise.proof.kit.results import CannotRun
from shardwise.proof.verify import command as verify

COMMANDS: dict[str, ModuleType] = {
    "checkpoint": checkpoint,
    "coverage": coverage,
    "fuzz": fuzz,
    "verify": verify,
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="shardwise", description="Distributed tensors for PyTorch.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").strip()
        first = summary.splitlines()[0]
        command = commands.add_parser(name, help=first, description=first)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return options.run(options)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
