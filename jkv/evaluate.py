"""``python -m jkv.evaluate``: see `jkv.commands.evaluate`."""

import sys

if __name__ == "__main__":
    from jkv.cli import run
    from jkv.commands.evaluate import main

    sys.exit(run(main))
