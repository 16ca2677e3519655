"""The peer of `tinymoe bench e2e`, in a process of its own: vLLM on the same shapes and workloads.

`python -m tinymoe.bench.gpu.e2e.peer_vllm FOLDER PASSES MAX_NUM_SEQS MAX_MODEL_LEN` prints a JSON line for each workload.
"""

import importlib
import json
import sys
import time

from tinymoe.bench.gpu.e2e.models import WORKLOADS, prompts_of


def main(folder: str, passes: int, max_num_seqs: int, max_model_len: int) -> None:
    vllm = importlib.import_module("vllm")
    start = time.perf_counter()
    llm = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        gpu_memory_utilization=0.85,
        seed=0,
        enable_prefix_caching=False,
        max_num_seqs=max_num_seqs,
    )
    print(json.dumps({"version": vllm.__version__, "start_s": time.perf_counter() - start}), flush=True)
    with open(f"{folder}/config.json") as file:
        vocab = json.load(file)["vocab_size"]
    for number, workload in enumerate(WORKLOADS):
        params = vllm.SamplingParams(
            max_tokens=workload.tokens_out, ignore_eos=True, temperature=1.0, detokenize=False
        )
        seconds = []
        for i in range(passes):  # the first may compile kernels
            prompts = prompts_of(workload, vocab, seed=number * passes + i)
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            if made != workload.requests * workload.tokens_out:
                raise ValueError(f"vLLM made {made} tokens for {workload}")
        print(json.dumps({"workload": list(workload), "seconds": min(seconds)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
