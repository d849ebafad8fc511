"""`python -m storage_ops {info,demo,plan,will-it-fit,fit,calibrate,bench}`, and `storage-ops-plan`.

Each command is a module here with `HELP`, an `EXAMPLE` for the end of its --help,
`add_arguments(parser)`, which groups the options, and `run(args, console)`, which returns the exit
code. It is 0 for an answer. It is 1 if the answer is no, or if something does not work here. It is
2, with one line, for wrong arguments and all other errors. `python -X dev` shows the traceback. As
in a shell, the code is 141 if the reader of the output is gone, and 130 after an interrupt.

Commands share `output.py` and `workload.py`, which creates the step by `hf_model.py` and
`hf_batch.py`, or by `model_function.py`. `demo/` imports optional packages, so it is imported only
when it runs. `info` and `plan` work without torch. `storage_ops_plan.py`, next to the package, runs
`plan` without importing torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

import storage_ops
from storage_ops.cli import bench, calibrate, demo, fit, info, output, plan, will_it_fit
from storage_ops.cli.workload import ModelError
from storage_ops.quantities import WIDTH

COMMANDS = {
    "info": info,
    "demo": demo,
    "plan": plan,
    "will-it-fit": will_it_fit,
    "fit": fit,
    "calibrate": calibrate,
    "bench": bench,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m storage_ops", description=storage_ops.__doc__)
    parser.add_argument("--version", action="version", version=storage_ops.__version__)
    parsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(
            parsers.add_parser(
                name,
                help=command.HELP,
                description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
                epilog=f"example:\n  python -m storage_ops {name} {command.EXAMPLE}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    try:
        try:
            args, console = parser.parse_args(argv), _console()
            with output.reserved(args):
                return int(COMMANDS[args.command].run(args, console))
        finally:  # also for --help
            sys.stdout.flush()
    except BrokenPipeError:
        return output.leave_quietly()
    except KeyboardInterrupt:
        if sys.flags.dev_mode:
            raise
        output.complain("Interrupted.")
        return output.INTERRUPTED
    except ModelError as error:
        if sys.flags.dev_mode:
            raise
        output.complain(error)  # arguments in its text are not those of the command
        return 2
    except Exception as error:  # the code of a model may raise any error
        if sys.flags.dev_mode:
            raise
        output.complain(error, args)
        return 2


def _console() -> Console:
    """Return standard output, as wide as its terminal. Without one, tables decide."""
    console = output.Pipe(file=sys.stdout)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = output.Pipe(file=sys.stdout, width=WIDTH)
    return console
