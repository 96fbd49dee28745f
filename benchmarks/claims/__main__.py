"""python -m benchmarks.claims"""

import sys

from benchmarks.claims.command import main

sys.exit(main())
