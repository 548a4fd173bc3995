"""`python -m posttrain`: the command line from a plain checkout."""

import sys

from posttrain.cli import main

sys.exit(main())
