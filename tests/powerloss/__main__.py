"""Entry point; see powerloss.py."""

import sys

from tests.powerloss.powerloss import main

sys.exit(main())
