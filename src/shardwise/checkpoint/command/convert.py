"""Write a checkpoint in another format.

It is read and written part by part: the model is never in memory as a whole, but of a folder of
torch.distributed.checkpoint each saved box is, and on the way from there to torch.save each tensor. The target appears
when it is complete. safetensors files hold tensors only; what else there is, is left out, and named.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from shardwise.checkpoint.catalogue import open_checkpoint
from shardwise.checkpoint.convert import Format, convert, format_of
from shardwise.checkpoint.models.save import num_bytes_of
from shardwise.checkpoint.torch_files import key_of
from shardwise.errors import CheckpointError
from shardwise.terminal import printable, progress
from shardwise.words import counted, size, some


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="PATH")
    add("target", type=Path, metavar="TARGET", help="what is to be written: a file or a folder, which is not there yet")
    add("--to", choices=get_args(Format), help="the format (by the name of TARGET: .safetensors, .pt, .pth, .bin)")
    add("--under", default="", metavar="KEY", help="only keys that begin so, without it: --under model.")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of safetensors files (5GB)")


def run(options: argparse.Namespace) -> int:
    to = options.to or format_of(options.target)
    if to is None:
        raise CheckpointError(
            f"{options.target} does not say which format is meant: say it with --to {' or '.join(get_args(Format))}"
        )
    try:
        most = num_bytes_of(options.max_shard_size)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    with open_checkpoint(options.source) as opened:
        source = opened.under(options.under)
        with progress(options.target.name, source.num_bytes, said=size) as done:
            left = convert(source, options.target, to, max_shard_size=most, done=done)
    print(f"{options.target}: {to}, {counted(len(source.items), 'tensor')}, {size(source.num_bytes)}")
    if left:
        print(f"left out, being no tensors: {printable(some(map(key_of, left), most=3))}")
    return 0
