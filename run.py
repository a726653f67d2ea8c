"""`resnet8ptq run` from a checkout: quantize, evaluate and track; see --help."""

import sys

from resnet8ptq.run import main

if __name__ == "__main__":
    sys.exit(main())
