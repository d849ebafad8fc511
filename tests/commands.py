"""Run a command of `python -m storage_ops` in this process."""

import json

from storage_ops.cli import main


def answer(command, capsys):
    """Return what a command prints as JSON."""
    assert main([*command, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(command, capsys):
    """Return the one line that a wrong command prints as its error."""
    code, (out, err) = main(command), capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1
    return err
