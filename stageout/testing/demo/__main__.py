"""``python -m stageout.testing.demo``."""

import sys

from stageout.testing.demo.driver import main

sys.exit(main())
