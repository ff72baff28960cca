"""Log-probabilities of a prompt's tokens by vLLM, as JSON: python vllm_logprobs.py FOLDER IDS."""

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    folder, ids = sys.argv[1], json.loads(sys.argv[2])
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, trust_remote_code=True)
    [done] = model.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    print(json.dumps([row[id].logprob for row, id in zip(done.prompt_logprobs[1:], ids[1:], strict=True)]))
