"""The command lines, one module each; ``python -m jkv.NAME`` runs ``jkv.commands.NAME``."""
