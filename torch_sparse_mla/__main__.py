"""`python -m torch_sparse_mla`

doctor: what runs here, and what is missing. demo: models of Transformers, alone and through the operators.
"""

import argparse
import sys

from .commands import demo, doctor


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; a bad option exits with 2 and names what is allowed."""
    parser = argparse.ArgumentParser(prog="python -m torch_sparse_mla", description=__doc__.partition("\n")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="{doctor,demo}")
    for command in (doctor, demo):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
