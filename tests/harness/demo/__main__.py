"""``python -m tests.harness.demo``."""

import sys

from tests.harness.demo.driver import main

sys.exit(main())
