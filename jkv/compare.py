"""``python -m jkv.compare``: see `jkv.commands.compare`."""

import sys

if __name__ == "__main__":
    from jkv.cli import run
    from jkv.commands.compare import main

    sys.exit(run(main))
