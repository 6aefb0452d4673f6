"""`python -m trainer`, which is what `torchrun -m trainer sft …` starts."""

import sys

from trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
