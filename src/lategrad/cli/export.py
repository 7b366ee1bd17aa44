"""``lategrad export``: the weights of a run as named tensors."""

import json
from math import prod
from pathlib import Path
from typing import Annotated

import typer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lategrad.cli.options import RunFolder
from lategrad.serve.observe.records import BEST_FILE
from lategrad.support.files import replacing
from lategrad.support.validation import require


def export(
    folder: RunFolder, file: Annotated[Path, typer.Argument(help="The file to write, such as net.safetensors.")],
    best: Annotated[bool, typer.Option("--best", help="The best record that --monitor found, not the last.")] = False,
) -> None:  # fmt: skip
    """Write the weights of a run as named tensors.

    Example:

        lategrad export runs/night net.safetensors --best

    Neither data nor code are needed. The file has the trained parameters of the output; buffers and frozen parameters
    are those of your model: `model.load_state_dict(load_file("net.safetensors"), strict=False)`.
    """
    is_the_runs = file.resolve().parent == folder.resolve() and file.name.startswith(("trace.", "best.", "checkpoint-"))
    require("the file", str(file), file.suffix == ".safetensors" and not is_the_runs,
            "one that ends in .safetensors, its format, and none of the run's own")  # fmt: skip
    source = folder / (BEST_FILE if best else "trace.safetensors")
    if not source.is_file():
        remedy = "it needs --monitor, and a record better than the start" if best else "a run writes it at its end"
        raise FileNotFoundError(f"no file {str(source)!r}: {remedy}")
    try:
        with safe_open(source, framework="pt") as stored:
            output, metadata = stored.get_tensor("output"), stored.metadata()
        shapes = json.loads(metadata["tensors"]) if best else json.loads(metadata["config"])["tensors"]
        parts = zip(shapes.items(), output.split(list(map(prod, shapes.values()))), strict=True)
        tensors = {name: part.view(shape).clone() for (name, shape), part in parts}
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{str(source)!r} is damaged, or of another version: {error}") from None
    with replacing(file) as part:
        save_file(tensors, part)
    typer.echo(f"{output.numel():,} parameters in {len(tensors)} tensors, written to {file}")
