"""``python -m logitless``, and with several processes ``torchrun --nproc-per-node N -m logitless train RECIPE``."""

import sys

from logitless.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
