"""Entry point; see run.py."""

import sys

from tests.attacks.run import main

sys.exit(main())
