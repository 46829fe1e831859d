"""List, show, verify, convert and compare checkpoints of any format.

PATH is a step that shardwise.checkpoint.save_step wrote, or the folder of a run, of which the latest step is taken; a
safetensors file, its index, or a folder with them; a folder of torch.distributed.checkpoint; or a file of torch.save.
Nothing is unpickled but tensors, numbers, text, and lists and dicts of these: no code that a file names is run.
"""

from __future__ import annotations

import argparse
import sys
from textwrap import fill
from types import ModuleType

from shardwise.checkpoint.command import convert, diff, ls, show, verify
from shardwise.errors import CheckpointError
from shardwise.terminal import printable

SUBCOMMANDS: dict[str, ModuleType] = {"ls": ls, "show": show, "verify": verify, "convert": convert, "diff": diff}

EXAMPLES = """\
examples:
  shardwise checkpoint ls run                               # the steps of a run
  shardwise checkpoint show run                             # what the latest one has
  shardwise checkpoint verify run/step-00000100             # every byte against its checksum
  shardwise checkpoint convert run model.safetensors --under model.
  shardwise checkpoint diff model.safetensors old-dcp-folder --relative 1e-6

exit status: 0 if all is well, 1 if verify finds damage or diff a difference, 2 if the command could not run.
"""


class Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Help with paragraphs as wide as the terminal. What is indented stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(part if "\n " in part else fill(part, width) for part in text.split("\n\n"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = (__doc__ or "").strip(), EXAMPLES
    parser.formatter_class = Paragraphs
    commands = parser.add_subparsers(title="commands", dest="subcommand", required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        about = (module.__doc__ or "").strip()
        command = commands.add_parser(name, help=about.splitlines()[0], description=about, formatter_class=Paragraphs)
        module.add_arguments(command)


def run(options: argparse.Namespace) -> int:
    try:
        return SUBCOMMANDS[options.subcommand].run(options)
    except (CheckpointError, OSError) as error:
        what = (error.strerror if isinstance(error, OSError) else None) or str(error)
        print(f"shardwise checkpoint {options.subcommand}: {printable(what)}", file=sys.stderr)
        return 2
