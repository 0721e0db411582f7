"""The command line: a file a command. Parses, calls, prints; decides nothing."""

import errno
import sys

import click

from llamagraph.cli.bench import bench
from llamagraph.cli.console import drop_stdout, prepare_streams
from llamagraph.cli.inspect_graph import inspect_graph
from llamagraph.cli.options import show_version
from llamagraph.cli.run import run
from llamagraph.errors import LlamaGraphError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@show_version
def cli() -> None:
    """Run GGUF language models, every decode step as one visible CUDA graph.

    \b
      llamagraph run "Why is the sky blue?"
      llamagraph run -m model.gguf -sys "Be brief."
      llamagraph run -m model.gguf -no-cnv "Once upon a time" -n 64 --temp 0
      cat letter.txt | llamagraph run --json -p "Sum this up:" -
      llamagraph inspect-graph --steps 600
    """


cli.add_command(run)
cli.add_command(bench)
cli.add_command(inspect_graph)


def main() -> None:
    """The console script: 0 done, 1 failure, 2 usage, 130 interrupted."""
    prepare_streams()
    try:
        cli.main(prog_name="llamagraph", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except LlamaGraphError as error:
        click.ClickException(str(error)).show()
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        drop_stdout()  # what could not be written is tried again at the exit, which would fail too
        click.ClickException(f"what is printed cannot be written: {error.strerror}").show()
        sys.exit(1)
