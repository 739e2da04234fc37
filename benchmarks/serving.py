"""Load on any OpenAI-compatible server: the code of `headrace bench`, with the same options.

python benchmarks/serving.py --url http://127.0.0.1:8000 --concurrency 1,4,16 --html page.html
"""

from __future__ import annotations

import sys

from headrace.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
