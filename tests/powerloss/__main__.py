"""See powerloss.py."""

import sys

from tests.powerloss.powerloss import main

sys.exit(main())
