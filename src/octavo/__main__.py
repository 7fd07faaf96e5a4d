"""``python -m octavo``: the same as the command ``octavo``."""

from octavo.cli import main

main()
