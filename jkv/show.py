"""``python -m jkv.show``: see `jkv.commands.show`."""

import sys

if __name__ == "__main__":
    from jkv.cli import run
    from jkv.commands.show import main

    sys.exit(run(main))
