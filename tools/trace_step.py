"""What a whole optimizer step costs on a GPU, operation by operation, without a GPU: ``hpclm planner --trace``.

python tools/trace_step.py configs/gpt2-124m.yaml --gpus-kind H200
python tools/trace_step.py configs/llama-7b.yaml --gpus 8 --by line --top 40
"""

import sys

from hpclm import cli
from hpclm.commands import planner

if __name__ == "__main__":
    raise SystemExit(cli.run(planner.main, ["--trace", *sys.argv[1:]]))
