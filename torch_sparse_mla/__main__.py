"""`python -m torch_sparse_mla`

doctor: what runs here, and what is missing. demo: models of Transformers, alone and through the operators. profile:
where a decode step's time goes. bench: the same step in every mode.
"""

import argparse
import sys

from .commands import bench_modes, demo, doctor, profile


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns its exit code; a bad option exits with 2 and names what is allowed."""
    parser = argparse.ArgumentParser(prog="python -m torch_sparse_mla", description=__doc__.partition("\n")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="{doctor,demo,profile,bench}")
    for command in (doctor, demo, profile, bench_modes):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
