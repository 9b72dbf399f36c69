"""``python -m jkv.generate``: see `jkv.commands.generate`. In Python, ``jkv.generate`` is the function of that name."""

import sys

if __name__ == "__main__":
    from jkv.cli import run
    from jkv.commands.generate import main

    sys.exit(run(main))
