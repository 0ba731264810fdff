"""The console script `jaxserve`.

Owns the names of its commands. Refuses behaviour: each command is a few lines around a function of the package.
"""

import importlib.metadata
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from jaxserve import __version__
from jaxserve.config import format_config, load_config
from jaxserve.console import set_up_logging
from jaxserve.run import ConfigOption, SetOption, run_app, run_command

app = typer.Typer(add_completion=False, help="LLM inference on JAX.")
app.command("run")(run_command)


@app.command("config")
def config_command(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Print the resolved config, each value with where it came from."""
    print(format_config(load_config(config, set_ or ())), end="")


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="Hugging Face style or Orbax directory.")],
    target: Annotated[Path, typer.Argument(help="New directory, of the other kind.")],
) -> None:
    """Convert a checkpoint: Hugging Face to Orbax, or back."""
    from jaxserve.models.orbax_io import convert  # JAX and Orbax take seconds to import

    set_up_logging(load_config().config.runtime.log_level)
    convert(source, target)
    print(f"wrote {target}")


@app.command("version")
def version_command() -> None:
    """Print the versions of jaxserve and of what it runs on."""
    print(f"jaxserve {__version__}")
    for name in ("jax", "jaxlib", "flax"):
        print(f"{name} {importlib.metadata.version(name)}")
    print(f"python {platform.python_version()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code. `arguments` default to those of the process."""
    return run_app(app, "jaxserve", arguments)


if __name__ == "__main__":
    sys.exit(main())
