"""python -m benchmarks.pages"""

import sys

from benchmarks.pages import main

sys.exit(main())
