"""``python -m kittiwake`` is ``kittiwake``."""

import sys

from kittiwake.cli.main import main

sys.exit(main())
